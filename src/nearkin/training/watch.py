"""Looks at a training while it goes on, and what follows from them."""

from typing import Any, Protocol, runtime_checkable

from nearkin.config import TrainConfig
from nearkin.distributed import whole
from nearkin.method import Method
from nearkin.run.reporter import Logged
from nearkin.training.health import Alarm
from nearkin.training.signals import Requests


@runtime_checkable
class Looker(Protocol):
    """Who looks at a method now and then while it trains."""

    def look(self, method: Method[Any]) -> dict[str, float]:
        """Measure a method as it stands, leaving it as it was."""


def look_due(every: int, done: int, per_epoch: int, total: int) -> bool:
    """Whether to look after `done` of `total` steps.

    Args:
        every: Epochs between looks; 0 means only at the end.
        done: Steps that are done.
        per_epoch: Steps in an epoch.
        total: Steps of the training.
    """
    epoch, part = divmod(done, per_epoch)
    return done == total or bool(every and not part and epoch % every == 0)


class Watch:
    """Has somebody look when it is time, and tells of embeddings that stay collapsed.

    Args:
        monitor: Who looks.
        config: When, and whether a collapse is to end the run.
        method: What is looked at. It goes on in training mode.
        trained: What takes the steps: the method, or what `shard` made of it.
        told: Who hears of a collapse.
        asked: Where the end of the run is asked for.
    """

    def __init__(
        self,
        monitor: Looker,
        config: TrainConfig,
        method: Method[Any],
        trained: Method[Any],
        told: Logged,
        asked: Requests,
    ) -> None:
        self.monitor = monitor
        self.every = int(config.evaluate_every)
        self.ends = config.on_collapse == "stop"
        self.method = method
        self.trained = trained
        self.told = told
        self.asked = asked
        self._alarm = Alarm(type(method))

    def after(self, done: int, per_epoch: int, total: int) -> dict[str, float]:
        """What is seen after `done` of `total` steps: nothing, if no look is due."""
        if not look_due(self.every, done, per_epoch, total):
            return {}
        with whole(self.method, self.trained):
            seen = self.monitor.look(self.method)
        verdict = self._alarm.hear(seen, done / total)
        if verdict and self.ends and done < total:
            self.asked.collapse(verdict)
        elif verdict:
            self.told.line(f"warning: {verdict}")
        return seen


def shown(looked: dict[str, float]) -> list[str]:
    """What was seen, for a line."""
    form = {"knn": "kNN {:.1%}", "feature_std": "std {:.2f}", "effective_rank": "rank {:.1f}"}
    return [text.format(looked[name]) for name, text in form.items() if name in looked]
