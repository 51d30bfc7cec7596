"""Numbers that training cannot go on from."""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from nearkin.distributed import undivided
from nearkin.errors import DivergedError


def not_finite(value: object, place: str = "") -> Iterator[str]:
    """Tensors of a state with such numbers. All processes look at what is divided among them."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from not_finite(part, f"{place}.{key}")
    elif isinstance(value, Tensor) and not undivided(value).isfinite().all():
        yield place.removeprefix(".")


def refuse(places: Iterable[str], step: int) -> None:
    """Stop training at the first of them.

    Raises:
        DivergedError: If there is one.
    """
    for place in places:
        raise DivergedError(
            f"{place} is no longer finite after step {step}; nothing was written since the "
            "checkpoint before. Try a smaller --lr"
        )
