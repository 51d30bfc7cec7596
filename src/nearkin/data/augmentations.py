"""Augmentations by name, with the numbers of the papers and their official code.

They are applied in one order: crop, jitter, gray, blur, solarize, flip. That is the papers' own
but for InstDisc and MoCo v1, which remove color first and jitter then. It makes no difference to
an image that keeps its color, and one that loses it is gray either way, only not of the very
same brightness. Crops of photographs are resampled bicubically, as by SimCLR's and BYOL's code,
those of small images in memory bilinearly; both average over what they shrink.
"""

from dataclasses import replace
from typing import Final

from nearkin.config import suggestion
from nearkin.data.views import View
from nearkin.errors import UsageError

INSTDISC: Final = View(
    flip=0.5, jitter=1.0, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.4, gray=0.2
)
"""Wu et al. 2018; He et al. 2020."""

MOCO: Final = replace(INSTDISC, jitter=0.8, hue=0.1, blur=0.5)
"""Chen, Fan et al. 2020 (MoCo v2); Chen & He 2021 (SimSiam)."""

SIMCLR: Final = View(
    scale=(0.08, 1.0),
    flip=0.5,
    jitter=0.8,
    brightness=0.8,
    contrast=0.8,
    saturation=0.8,
    hue=0.2,
    gray=0.2,
    blur=0.5,
)
"""Chen, Kornblith et al. 2020, appendix A, color distortion of strength 1."""

SMALL: Final = replace(MOCO, scale=(0.08, 1.0), blur=0.0)
"""The CIFAR-10 demonstration of MoCo, and SimCLR's appendix B.9: strength 0.5, no blur."""

BYOL: Final = replace(SIMCLR, brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
"""Grill et al. 2020, appendix B, what the two views have in common."""

SWAV: Final = replace(SIMCLR, scale=(0.14, 1.0))
"""Caron et al. 2020, the large views."""

NCL: Final = View(scale=(0.5, 1.0), flip=0.5)
"""Zhong et al. 2021, official code for ImageNet."""

CHARACTERS: Final = View(
    scale=(0.6, 1.0), jitter=0.8, brightness=0.4, contrast=0.4, rotate=15.0, translate=0.1
)
"""For digits and letters, which a flip turns into others and whose color says nothing."""


def asymmetric(view: View) -> tuple[View, View]:
    """The two views of BYOL, Barlow Twins and VICReg: they differ in blur and solarization."""
    return replace(view, blur=1.0), replace(view, blur=0.1, solarize=0.2)


def local(view: View) -> tuple[View, ...]:
    """The six small views of SwAV, and of DINO with a ResNet-50."""
    return (replace(view, scale=(0.05, 0.14), side=96 / 224),) * 6


AUGMENTATIONS: Final[dict[str, tuple[View, ...]]] = {
    "simclr": (SIMCLR,),
    "moco_v1": (INSTDISC,),
    "moco_v2": (MOCO,),
    "moco_v3": asymmetric(replace(BYOL, scale=(0.2, 1.0))),
    "byol": asymmetric(BYOL),
    "swav": (SWAV, SWAV, *local(SWAV)),
    "dino": (*asymmetric(replace(BYOL, scale=(0.14, 1.0))), *local(BYOL)),
    "simsiam": (MOCO,),
    "ncl": (NCL,),
    "simclr_cifar": (SMALL,),
    "moco_cifar": (SMALL,),
    "instdisc_cifar": (replace(INSTDISC, flip=0.0),),
    "simsiam_cifar": (replace(MOCO, blur=0.0),),
    "swav_cifar": (replace(SMALL, scale=(0.14, 1.0)),),
    "asymmetric_cifar": (replace(BYOL, blur=0.0), replace(BYOL, blur=0.0, solarize=0.2)),
    "vicreg_cifar": (replace(BYOL, scale=(0.2, 1.0), blur=0.0, solarize=0.1),),
    "ncl_cifar": (replace(NCL, scale=(1.0, 1.0), ratio=(1.0, 1.0), translate=4 / 32),),
    "characters": (CHARACTERS,),
}
"""The views of each augmentation. A single one is drawn as often as a method asks for views."""


def views_of(name: str, count: int, *, more: bool = False) -> tuple[View, ...]:
    """The first `count` views of an augmentation, or its only view `count` times.

    Args:
        name: One of `AUGMENTATIONS`.
        count: How many views a method needs.
        more: Whether it makes use of all that an augmentation has.

    Raises:
        UsageError: If there is no such augmentation, or it has fewer views, more than one.
    """
    views = AUGMENTATIONS.get(name)
    if views is None:
        hint = suggestion(name, AUGMENTATIONS)
        raise UsageError(f"unknown augmentation {name}.{hint} One of {_names()}")
    if len(views) == 1:
        return views * count
    if len(views) < count:
        raise UsageError(
            f"augmentation {name} has {len(views)} views, and the method needs {count}; "
            f"choose another of {_names()}"
        )
    return views if more else views[:count]


def _names() -> str:
    return ", ".join(AUGMENTATIONS)
