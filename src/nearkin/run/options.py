"""What a method takes from its run: its options, known classes, and a teacher."""

from collections.abc import Mapping
from typing import Any

from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.data.views import View
from nearkin.errors import UsageError
from nearkin.extensions import label
from nearkin.labels.known import listed
from nearkin.method import Method
from nearkin.methods import method_class, parameters
from nearkin.pace import count
from nearkin.schema import (
    BatchGroups,
    MemorySize,
    Value,
    check_value,
    from_text,
    metadata,
    option,
    suggestion,
    types_of,
)

SMALLEST_GROUP = 2  # Images that batch statistics can be taken over
USUAL_GROUP = 16  # Images in a group that `auto` leaves at least
OF_COMMANDS = ("output", "resume", "overwrite", "config")  # What may be meant, beside settings


def default_options(cls: type[Method[Any]]) -> dict[str, Any]:
    """A method's options where the user gives none: its `defaults`, or else its constructor's."""
    papers = {key: parameter.default for key, parameter in parameters(cls).items()}
    return papers | dict(cls.defaults.options)


def fitted_options(cls: type[Method[Any]]) -> dict[str, MemorySize | BatchGroups]:
    """The options that `auto` fits to the number of images or to the batch, with their marks."""
    kinds = types_of(cls.__init__)
    marks = {
        key: metadata(kinds[key], MemorySize) or metadata(kinds[key], BatchGroups)
        for key in parameters(cls)
    }
    return {key: mark for key, mark in marks.items() if mark}


def checked_options(
    name: str,
    requested: Mapping[str, Value],
    kind: type[TrainConfig | DiscoverConfig] = TrainConfig,
) -> dict[str, Any]:
    """Return options as a method's constructor takes them; an unknown one may mean a setting."""
    cls = method_class(name)
    options, kinds = parameters(cls), types_of(cls.__init__)
    checked = {}
    for key, value in requested.items():
        if key not in options:
            near = suggestion(key, [*options, *kind.__dataclass_fields__, *OF_COMMANDS])
            raise UsageError(
                f"unknown option {option(key)} for {label(name)}.{near} "
                f"`nearkin list settings {name}` lists them"
            )
        given = from_text(value, kinds[key]) if isinstance(value, str) else value
        checked[key] = check_value(key, given, kinds[key])
    return checked


def method_options(
    name: str,
    requested: Mapping[str, Value],
    num_images: int,
    batch_size: int,
    chunk_size: int = 0,
    processes: int = 1,
) -> dict[str, Value]:
    """Return all options of a method: as requested, or its defaults, fitted to data and batch."""
    cls = method_class(name)
    options = default_options(cls) | checked_options(name, requested)
    half = num_images // 2
    for key, mark in fitted_options(cls).items():
        value = options[key]
        if isinstance(mark, BatchGroups):
            if key in requested:
                _check_groups(key, value, batch_size, processes)
            else:
                options[key] = _fitting_groups(value, batch_size, chunk_size, processes)
        elif key in requested:
            most = _most(cls, key, num_images)
            # Which `auto` takes, and a run that is resumed has it as if it were given.
            least = min(batch_size, half, default_options(cls)[key]) if mark.holds_batch else 0
            _check_memory(key, value, num_images, least, most)
        else:
            options[key] = min(value, half // batch_size * batch_size or half)
    return options


def _most(cls: type[Method[Any]], key: str, num_images: int) -> int:
    """The largest memory that is taken: of half of the images, or the paper's."""
    return max(num_images // 2, int(parameters(cls)[key].default))


def within(name: str, requested: Mapping[str, Value], num_images: int) -> dict[str, Value]:
    """Return requested options with memories of at most what `method_options` takes."""
    cls = method_class(name)
    reduced = dict(requested)
    for key, mark in fitted_options(cls).items():
        if key in requested and not isinstance(mark, BatchGroups):
            reduced[key] = min(requested[key], _most(cls, key, num_images))
    return reduced


def _check_memory(key: str, size: int, num_images: int, least: int, most: int) -> None:
    """Refuse a memory beyond half of the images and beyond the paper's, or one below a batch."""
    if size > most:
        raise UsageError(
            f"{option(key)} {size} is more than half of the {num_images} images; "
            f"give at most {most}"
        )
    if size < least:
        raise UsageError(f"{option(key)} {size} is too small for the batch; give at least {least}")


def _check_groups(key: str, groups: int, batch_size: int, processes: int) -> None:
    """Refuse groups that do not divide the batch, hold a single image, or no process can have."""
    if batch_size % groups or batch_size // groups < SMALLEST_GROUP:
        raise UsageError(
            f"{option(key)} {groups} does not divide a batch of {batch_size} into equal parts of "
            f"{SMALLEST_GROUP} images or more; change one of them"
        )
    if not _shared(groups, processes):
        near = range(1, 2 * max(groups, processes) + 1)
        fitting = ", ".join(str(n) for n in near if batch_size % n == 0 and _shared(groups, n))
        raise UsageError(
            f"{option(key)} {groups} cannot be shared evenly by {processes} processes, but by "
            f"{fitting}; or give a multiple of {processes}, or a number that divides it"
        )


def _fitting_groups(groups: int, batch_size: int, chunk_size: int, processes: int) -> int:
    """The chunks of the batch, or the most groups of enough images that all processes can have."""
    if chunk_size:
        return max(1, batch_size // chunk_size)
    fitting = [g for g in range(1, groups + 1) if batch_size % g == 0 and _shared(g, processes)]
    return max(g for g in fitting if g == 1 or batch_size // g >= USUAL_GROUP)


def _shared(groups: int, processes: int) -> bool:
    """Whether each process can have whole groups, or each group whole processes."""
    return groups % processes == 0 or processes % groups == 0


def known_classes(config: TrainConfig) -> list[str]:
    """Return the names given with `--known`, in their order, or raise UsageError."""
    names = listed(config.known)
    uses = method_class(config.method).uses_labels
    if uses and not names:
        raise UsageError(f"{config.method} learns from known classes; name them with --known A,B")
    if names and not uses:
        raise UsageError(f"{config.method} uses no labels; leave --known out")
    return names


def kinds_of_views(config: TrainConfig) -> tuple[str | View, ...]:
    """Return the kinds of the views that a training is asked to take of each image."""
    cls = method_class(config.method)
    further = config.num_views - len(cls.views)
    if config.num_views and (further < 0 or (further > 0 and not cls.more_views)):
        more = " or more" if cls.more_views else ""
        raise UsageError(
            f"{label(config.method)} takes {count(len(cls.views), 'view')} of an image{more}, not "
            f"{config.num_views}; leave --num-views out"
        )
    return (*cls.views, *("reduced",) * further)


def check_teacher(config: TrainConfig) -> None:
    """Refuse a method without the teacher it learns from, and a teacher without such a method."""
    uses = method_class(config.method).uses_teacher
    if uses and not config.teacher:
        raise UsageError(
            f"{label(config.method)} learns from a teacher; name an encoder with --teacher, such "
            "as dinov2-small or a run"
        )
    if not uses and (config.teacher or config.teacher_views not in ("auto", 0)):
        what = "--teacher" if config.teacher else "--teacher-views"
        raise UsageError(f"{label(config.method)} has no teacher; leave {what} out")
