"""Looks at a training while it goes on, and what follows from them."""

from typing import Any, Protocol, runtime_checkable

from nearkin.config import TrainConfig
from nearkin.method import Method
from nearkin.runs.record.reporter import Logged
from nearkin.runs.training.signals import Requests
from nearkin.training.health import Alarm


@runtime_checkable
class Looker(Protocol):
    """Who looks at a method now and then while it trains."""

    def look(self, method: Method[Any]) -> dict[str, float]:
        """Measure a method as it stands, leaving it as it was."""


class Watch:
    """Has somebody look when it is time, and tells of embeddings that stay collapsed.

    Args:
        monitor: Who looks.
        config: When, and whether a collapse is to end the run.
        method: What is looked at. It goes on in training mode.
        told: Who hears of a collapse.
        asked: Where the end of the run is asked for.
    """

    def __init__(
        self,
        monitor: Looker,
        config: TrainConfig,
        method: Method[Any],
        told: Logged,
        asked: Requests,
    ) -> None:
        self.monitor = monitor
        self.every = int(config.evaluate_every)
        self.ends = config.on_collapse == "stop"
        self.method = method
        self.told = told
        self.asked = asked
        self._alarm = Alarm(type(method))

    def after(self, done: int, per_epoch: int, total: int) -> dict[str, float]:
        """What is seen after `done` of `total` steps: nothing, if no look is due."""
        epoch, part = divmod(done, per_epoch)
        due = not part and self.every and epoch % self.every == 0
        if not due and done < total:
            return {}
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
