"""Progress, speed and counts, for people to read: nothing depends on them."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Final, TypeVar

ProgressCallback = Callable[[int, int, str], object]
"""Called with the number done, the total, and a text whose parts are two spaces apart; a narrow
display may show the first part only."""

Batch = TypeVar("Batch", bound=Sized)

MARKS: Final = 60  # Points in time, at least a second apart, over which speed is averaged


def ignore_progress(done: int, total: int, text: str) -> None:
    """Do nothing."""


def under(name: str, on_progress: ProgressCallback) -> ProgressCallback:
    """Prefix the texts of a callback with a name."""
    return lambda done, total, text: on_progress(done, total, f"{name}: {text}")


def tracked(
    batches: Iterable[Batch], total: int, what: str, on_progress: ProgressCallback
) -> Iterator[Batch]:
    """Yield the batches of `total` images; call `on_progress` after each."""
    pace, done = Pace(total), 0
    for batch in batches:
        yield batch
        done += len(batch)
        on_progress(done, total, "  ".join([what, *pace.reach(done)]))


def count(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural.

    >>> count(1, "image"), count(1200, "class")
    ('1 image', '1,200 classes')
    """
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural}"


class Pace:
    """The speed of a loop, and the time left.

    Only recent steps count: not those before a resume, nor the first one, which warms up.

    Args:
        total: How many steps there are.
        images: Images per step.
    """

    def __init__(self, total: int, images: int = 1) -> None:
        self.total, self.images = total, images
        self._began = time.perf_counter()
        self._paused = 0.0
        self._newest = 0.0, 0
        self._marks: deque[tuple[float, int]] = deque(maxlen=MARKS)

    def reach(self, done: int) -> list[str]:
        """Record the number of steps done; return texts on the speed and the time so far."""
        self._newest = time.perf_counter() - self._paused, done
        if not self._marks or self._newest[0] - self._marks[-1][0] >= 1:
            self._marks.append(self._newest)
        return [*self.speed, f"{span(time.perf_counter() - self._began)} so far"]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of a `with` block out of the speed."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - before

    @property
    def speed(self) -> list[str]:
        """Texts on the time left and on images per second; none before they are known."""
        (then, first), (now, done) = self._marks[0] if self._marks else self._newest, self._newest
        if now <= then or done <= first:
            return []
        rate = (done - first) / (now - then)
        left, images = (self.total - done) / rate, rate * self.images
        return [f"{span(left)} left", f"{images:.{0 if images >= 10 else 1}f} img/s"]


def span(seconds: float) -> str:
    """Format seconds as h:mm:ss.

    >>> span(754.0), span(4000.0)
    ('12:34', '1:06:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
