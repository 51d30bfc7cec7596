"""Augmentations: views by name, with the numbers of the papers, or from a file, or as values.

Operations run in one order: crop, jitter, gray, blur, solarize, flip. The papers' order is the
same, except InstDisc and MoCo v1, which remove color before jitter: an image that keeps its color
is the same either way, and one that loses it is gray either way, only its brightness differs.
Photographs are cropped bicubically, as in SimCLR's and BYOL's code, small images in memory
bilinearly, as in lightly, or bicubically, as in solo-learn; all with antialiasing. Brightness is
multiplied, as in torchvision and in SimCLR's code of today, or added, as in SimCLR's code for its
paper and in BYOL's.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from nearkin.data.views import View
from nearkin.errors import UsageError
from nearkin.extensions import is_reference, load_reference
from nearkin.places import user_path
from nearkin.schema import suggestion
from nearkin.toml import load_toml

INSTDISC: Final = View(
    flip=0.5, jitter=1.0, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.4, gray=0.2
)  # Wu et al. 2018; He et al. 2020
# Chen, Fan et al. 2020 (MoCo v2); Chen & He 2021 (SimSiam)
MOCO: Final = replace(INSTDISC, jitter=0.8, hue=0.1, blur=0.5)
# Chen, Kornblith et al. 2020, appendix A, color distortion of strength 1
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
# The CIFAR-10 demonstration of MoCo, and SimCLR's appendix B.9: strength 0.5, no blur
SMALL: Final = replace(MOCO, scale=(0.08, 1.0), blur=0.0)
# Grill et al. 2020, appendix B, what the two views have in common
BYOL: Final = replace(SIMCLR, brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
SOLO: Final = replace(BYOL, blur=0.0, interpolation="bicubic")  # solo-learn's asymmetric.yaml
SWAV: Final = replace(SIMCLR, scale=(0.14, 1.0))  # Caron et al. 2020, the large views
# Balestriero & LeCun 2025, official code, the large views
LEJEPA: Final = replace(BYOL, scale=(0.3, 1.0), solarize=0.2)
NCL: Final = View(scale=(0.5, 1.0), flip=0.5)  # Zhong et al. 2021, official code for ImageNet
# Wen et al. 2023, official code: a crop of 224 of 256 px
SIMGCD: Final = View(scale=((224 / 256) ** 2,) * 2, ratio=(1.0, 1.0), flip=0.5)
# Fini et al. 2021, official code for the paper
UNO: Final = replace(
    NCL, jitter=0.5, brightness=0.3, contrast=0.3, saturation=0.15, hue=0.1, gray=0.1, blur=0.2
)
# For digits and letters: a flip turns them into others, and their color carries no meaning.
# Strong changes of brightness and contrast, on which Fashion-MNIST depends (docs/lab.md)
CHARACTERS: Final = View(
    scale=(0.6, 1.0), jitter=0.8, brightness=0.8, contrast=0.8, rotate=15.0, translate=0.1
)


def small(view: View) -> View:
    """A small crop at low resolution: the multi-crop views of SwAV, and of DINO's ResNet-50."""
    return replace(view, kind="small", scale=(0.05, 0.14), size=96 / 224)


REDUCED: Final = 2 / 3  # Side of a view of kind "reduced"
DERIVED: Final[dict[str, Callable[[View], View]]] = {
    # Crop, shift and flip only: the weak view of ReSSL (Zheng et al. 2021) and of FixMatch
    "weak": lambda view: replace(
        view, kind="weak", jitter=0.0, gray=0.0, blur=0.0, solarize=0.0, rotate=0.0
    ),
    "small": small,
    # Less than half the cost, and shows as much of the image
    "reduced": lambda view: replace(view, kind="reduced", size=REDUCED * view.size),
    "gray": lambda view: replace(view, kind="gray", gray=1.0),
}
"""Kinds of views that every augmentation has: its own or, without one, derived from its first."""


def asymmetric(view: View) -> tuple[View, View]:
    """The two views of BYOL, Barlow Twins and VICReg: they differ in blur and solarization."""
    return replace(view, blur=1.0), replace(view, blur=0.1, solarize=0.2)


AUGMENTATIONS: Final[dict[str, tuple[View, ...]]] = {
    "simclr": (SIMCLR,),
    "simclr_additive": (replace(SIMCLR, additive_brightness=True),),
    "moco_v1": (INSTDISC,),
    "moco_v2": (MOCO,),
    "moco_v3": asymmetric(replace(BYOL, scale=(0.2, 1.0))),
    "byol": asymmetric(BYOL),
    "byol_additive": asymmetric(replace(BYOL, additive_brightness=True)),
    "swav": (SWAV, SWAV, *(small(SWAV),) * 6),
    "dino": (*asymmetric(replace(BYOL, scale=(0.14, 1.0))), *(small(BYOL),) * 6),
    "dino_vit": (
        *asymmetric(replace(BYOL, scale=(0.4, 1.0))),
        *(replace(small(BYOL), scale=(0.05, 0.4)),) * 8,
    ),
    "lejepa": (
        *(LEJEPA,) * 2,
        *(replace(LEJEPA, kind="small", scale=(0.05, 0.3), size=98 / 224),) * 6,
    ),
    "simsiam": (MOCO,),
    "ncl": (NCL,),
    "simgcd": (SIMGCD,),
    "uno": (UNO,),
    "simclr_cifar": (SMALL,),
    "moco_cifar": (SMALL,),
    "instdisc_cifar": (replace(INSTDISC, flip=0.0),),
    "simsiam_cifar": (replace(MOCO, blur=0.0),),
    "swav_cifar": (replace(SMALL, scale=(0.14, 1.0)),),
    "asymmetric_cifar": (replace(BYOL, blur=0.0), replace(BYOL, blur=0.0, solarize=0.2)),
    "solo_cifar": (SOLO, replace(SOLO, solarize=0.2)),
    "lejepa_cifar": (replace(BYOL, scale=(0.2, 1.0), blur=0.0, solarize=0.1),),
    "vicreg_cifar": (replace(SOLO, scale=(0.2, 1.0), solarize=0.1),),
    "ncl_cifar": (
        replace(NCL, scale=(1.0, 1.0), ratio=(1.0, 1.0), translate=4 / 32, whole_shifts=True),
    ),
    "uno_cifar": (replace(UNO, scale=(0.8, 1.0), blur=0.0),),
    "characters": (CHARACTERS,),
}
"""The views of each augmentation; a single one serves for any number of views."""

MAX_VIEWS: Final = 64

Augment = str | Sequence[View] | Sequence[dict[str, Any]]
"""A name of `AUGMENTATIONS`, the path of a .toml file, or the views themselves."""


def augmentation(augment: Augment) -> tuple[View, ...]:
    """The views that a name, a file or a list stands for.

    A name is one of `AUGMENTATIONS`; FILE.py:NAME or module:NAME of a view, of several, or of a
    function that returns them; or the path of a .toml file with one [[views]] table per view.
    """
    if not isinstance(augment, str):
        return _views(augment, "augment")
    if is_reference(augment):
        views = load_reference(augment, "augmentation")
        return _views(views() if callable(views) else views, f"augment {augment}")
    if augment in AUGMENTATIONS:
        return AUGMENTATIONS[augment]
    if augment.endswith(".toml"):
        content = load_toml(user_path(augment), "the views of")
        if unknown := content.keys() - {"views"}:
            key = min(unknown)
            raise UsageError(f"{augment}: unknown key {key}; give [[views]] tables only")
        views = content.get("views", [])
        return _views(views if isinstance(views, list) else [views], augment)
    hint = suggestion(augment, AUGMENTATIONS)
    names = ", ".join(AUGMENTATIONS)
    raise UsageError(f"unknown augmentation {augment}.{hint} One of {names}, or a .toml file")


def stored_views(augment: Augment) -> str | list[dict[str, Any]]:
    """An augmentation as config.toml holds it: a name of the package, or the views themselves."""
    if isinstance(augment, str) and augment in ("auto", *AUGMENTATIONS):
        return augment
    return [view.to_dict() for view in augmentation(augment)]


def _views(entries: Any, where: str) -> tuple[View, ...]:
    """A view, or several, each a `View` or a dictionary of its fields."""
    entries = [entries] if isinstance(entries, View | dict) else entries
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise UsageError(f"{where} is a {type(entries).__name__}; give a View, or several")
    if not 1 <= len(entries) <= MAX_VIEWS:
        raise UsageError(f"{where}: {len(entries)} views; give 1 to {MAX_VIEWS}")
    views = []
    for number, entry in enumerate(entries, start=1):
        try:
            views.append(entry if isinstance(entry, View) else View.from_dict(entry))
        except UsageError as error:
            raise UsageError(f"{where}, view {number}: {error}") from error
    return tuple(views)


def measured_view(augment: Augment) -> View:
    """The view that measures of features take: the first strong one, or else the first."""
    own = augmentation(augment)
    return next((view for view in own if view.kind == "strong"), own[0])


def views_of(
    augment: Augment, kinds: Sequence[str | View] = ("strong", "strong"), *, more: bool = False
) -> tuple[View, ...]:
    """The views that a method gets of an augmentation.

    A `View` among `kinds` is taken as it is. A kind takes the augmentation's views of that kind
    in their order; a single one serves any number of times. Kinds of `DERIVED` are derived from
    the augmentation's first view where it has none of them. `more` appends all further views
    of the augmentation (multi-crop).
    """
    own = augmentation(augment)
    name = augment if isinstance(augment, str) else "of your own"
    views, taken = [], Counter[str]()
    for kind in kinds:
        if isinstance(kind, View):
            views.append(kind)
            continue
        of_kind = [view for view in own if view.kind == kind]
        if not of_kind and kind in DERIVED:
            of_kind = [DERIVED[kind](own[0])]
        position = 0 if len(of_kind) == 1 else taken[kind]
        if position >= len(of_kind):
            raise UsageError(
                f"augmentation {name} has {len(of_kind)} {kind} views, and the method needs "
                f"{kinds.count(kind)}; choose another"
            )
        views.append(of_kind[position])
        taken[kind] += 1
    for view in own if more else ():
        if taken[view.kind] > 0:
            taken[view.kind] -= 1
        else:
            views.append(view)
    return tuple(views)
