"""How far something is and how fast it goes: for people to read; nothing depends on it."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Final, TypeVar

ProgressCallback = Callable[[int, int, str], object]
"""Hears how many of how many are done, and how it stands: parts that are two spaces apart, of
which only the first may be shown."""

Batch = TypeVar("Batch", bound=Sized)

MARKS: Final = 60
"""Moments, each a second or more after the one before, over which speed is taken."""


def ignore_progress(done: int, total: int, text: str) -> None:
    """Hear it, and do nothing."""


def under(name: str, on_progress: ProgressCallback) -> ProgressCallback:
    """The same listener, who is told what it is that a part is of."""
    return lambda done, total, text: on_progress(done, total, f"{name}: {text}")


def tracked(
    batches: Iterable[Batch], total: int, what: str, on_progress: ProgressCallback
) -> Iterator[Batch]:
    """The batches of `total` images; whenever one is done, `on_progress` hears how far it is."""
    pace, done = Pace(total), 0
    for batch in batches:
        yield batch
        done += len(batch)
        on_progress(done, total, "  ".join([what, *pace.reach(done)]))


class Pace:
    """The speed of something that takes steps, and the time it still needs.

    Only recent steps count: not those of an earlier start, nor the first one, which warms up.

    Args:
        total: How many steps there are.
        images: In a step.
        clock: Seconds from any start.
    """

    def __init__(
        self, total: int, images: int = 1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.total, self.images, self.clock = total, images, clock
        self._began = clock()
        self._paused = 0.0
        self._newest = 0.0, 0
        self._marks: deque[tuple[float, int]] = deque(maxlen=MARKS)

    def reach(self, done: int) -> list[str]:
        """Note that so many of all steps are done now, and say the speed and the time so far."""
        self._newest = self.clock() - self._paused, done
        if not self._marks or self._newest[0] - self._marks[-1][0] >= 1:
            self._marks.append(self._newest)
        return [*self.speed, f"{_span(self.clock() - self._began)} so far"]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do something within a `with` block that is none of the steps."""
        before = self.clock()
        try:
            yield
        finally:
            self._paused += self.clock() - before

    @property
    def speed(self) -> list[str]:
        """The time left, and images per second; nothing as long as neither is known."""
        (then, first), (now, done) = self._marks[0] if self._marks else self._newest, self._newest
        if now <= then or done <= first:
            return []
        rate = (done - first) / (now - then)
        left, images = (self.total - done) / rate, rate * self.images
        return [f"{_span(left)} left", f"{images:.{0 if images >= 10 else 1}f} img/s"]


def _span(seconds: float) -> str:
    """A time as people read it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
