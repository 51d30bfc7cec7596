"""LoRA: a frozen network learns through small matrices beside its linear layers; by `peft`."""

import copy
from typing import Any

from torch import nn

from nearkin.errors import UsageError
from nearkin.networks.branch import Backbone, hooked, trial


def add_lora(backbone: Backbone, rank: int, image_size: int) -> None:
    """Freeze a network and put a trained matrix of a low rank beside each linear layer, in place.

    Hu et al. LoRA: low-rank adaptation of large language models. arXiv:2106.09685, section 4.1,
    with alpha equal to the rank, the rows of A: `W x + B A x`, where B starts at 0, so that the
    features stay. Layers of attention and of perceptrons get one, convolutions do not.

    Raises:
        UsageError: If peft is not installed, or no linear layer is there.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UsageError("--lora needs peft; install it by pip install 'nearkin[lora]'") from error
    body, called = backbone.body, list[str]()
    linears = {layer: name for name, layer in body.named_modules() if type(layer) is nn.Linear}
    # Some networks read the weights of a layer instead; a matrix beside it would do nothing.
    noted = hooked(linears, lambda layer, *_: called.append(linears[layer]))
    with noted, trial(body, image_size) as images:
        body(images)
    if not called:
        raise UsageError(
            f"backbone {backbone.name} has no linear layers for --lora; leave it out, and give a "
            "--layer-decay instead"
        )
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(dict.fromkeys(called)))
    inject_adapter_in_model(config, body)


def merged(backbone: Backbone) -> Backbone:
    """Return a plain network that computes the same: its weights are `W + B A`.

    A backbone without LoRA is returned as it is.
    """
    modules = backbone.body.named_modules()
    adapted = [name for name, module in modules if hasattr(module, "get_base_layer")]
    if not adapted:
        return backbone
    plain = copy.deepcopy(backbone)
    for name in adapted:
        layer: Any = plain.body.get_submodule(name)
        layer.merge(safe_merge=True)
        plain.body.set_submodule(name, layer.get_base_layer())
    vars(plain.body).pop("peft_config", None)  # of no use to a plain network
    return plain
