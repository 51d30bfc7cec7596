"""Encoders as their authors use them, where timm's defaults differ.

Another pooling or another activation than in pretraining costs accuracy without any error. What is
changed is printed when the encoder is loaded. DINOv2 with and without registers, MAE, I-JEPA,
AIMv2, ConvNeXt V2, EVA-02 and Perception Encoder need no entry: tests/encoders/test_families.py
and test_rotary_families.py compare them.
"""

import re
from typing import Any, Final, NamedTuple

from nearkin.networks.backbone import architecture, query_options, timm_names


class Deviation(NamedTuple):
    """An option of an architecture of timm that its authors set otherwise."""

    architectures: re.Pattern[str]
    option: str
    value: str
    what: str
    """The sentence that is printed: what the authors do, and where they say so."""


DEVIATIONS: Final = (
    Deviation(
        re.compile(r"vit_\w+_dinov3(_qkvb)?"),
        "global_pool",
        "token",
        "class token, as DINOv3 is evaluated (arXiv:2508.10104, section 6.1); timm averages",
    ),
    Deviation(
        re.compile(r"vit_\w+_siglip_\d+"),
        "act_layer",
        "gelu_tanh",
        "GELU by tanh, as SigLIP was trained (flax.linen.gelu); timm has the exact one",
    ),
)
OWN_STATISTICS: Final = re.compile(r"clip|siglip|eva|_pe_|aimv2|beit")
"""Families of timm whose images are always normalized alike, and mostly not by ImageNet's mean."""
QUICK_GELU: Final = "QuickGELU"
"""In timm's notes on weights that were trained with x sigmoid(1.702 x) in the place of GELU."""


def as_authors(name: str, config: Any = None) -> tuple[str, list[str]]:
    """Return the name of an encoder of timm as its authors use it, and what is to be said of it.

    Args:
        name: `timm:NAME[.TAG][?option=value]`. Its options are kept.
        config: timm's configuration of the weights; None if they are of a file that says nothing.
    """
    parts = architecture(name)
    notes = list(getattr(config, "notes", None) or ())
    if any(QUICK_GELU in note for note in notes):
        notes = [note for note in notes if QUICK_GELU not in note]
        variant = parts.bare.replace("_clip_", "_clip_quickgelu_")
        if "quickgelu" not in parts.bare and variant in timm_names():
            notes.append(f"{QUICK_GELU}, as these weights were trained: {variant}")
            parts = parts._replace(bare=variant)
    options, query = query_options(parts.query), parts.query
    for deviation in DEVIATIONS:
        if deviation.architectures.fullmatch(parts.bare) and deviation.option not in options:
            query += f"{'&' if query else ''}{deviation.option}={deviation.value}"
            notes.append(deviation.what)
    return str(parts._replace(query=query)), notes
