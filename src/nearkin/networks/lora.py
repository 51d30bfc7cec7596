"""LoRA: a frozen network learns through small matrices beside its linear layers; by `peft`."""

import copy
from typing import Any

import torch
from torch import nn

from nearkin.errors import UsageError
from nearkin.networks.branch import Backbone, eval_mode, hooked, trial_images


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
    layers = _called_linears(backbone.body, image_size)
    if not layers:
        raise UsageError(
            f"backbone {backbone.name} has no linear layers for --lora; leave it out, and give a "
            "--layer-decay instead"
        )
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=layers)
    inject_adapter_in_model(config, backbone.body)


def _called_linears(body: nn.Module, image_size: int) -> list[str]:
    """Return the names of linear layers that run as modules.

    Some networks read the weights of such a layer instead; a matrix beside it would do nothing.
    """
    linears = {layer: name for name, layer in body.named_modules() if type(layer) is nn.Linear}
    called = list[str]()
    noted = hooked(linears, lambda layer, *_: called.append(linears[layer]))
    with noted, torch.no_grad(), eval_mode(body):
        body(trial_images(body, image_size))
    return list(dict.fromkeys(called))


def merged(backbone: Backbone) -> Backbone:
    """Return a plain network that computes the same: its weights are `W + B A`.

    A backbone without LoRA is returned as it is.
    """
    if not _adapted(backbone.body):
        return backbone
    plain = copy.deepcopy(backbone)
    for name in _adapted(plain.body):
        layer: Any = plain.body.get_submodule(name)
        layer.merge(safe_merge=True)
        plain.body.set_submodule(name, layer.get_base_layer())
    vars(plain.body).pop("peft_config", None)  # of no use to a plain network
    return plain


def _adapted(body: nn.Module) -> list[str]:
    """Return the names of layers with LoRA."""
    return [name for name, module in body.named_modules() if hasattr(module, "get_base_layer")]
