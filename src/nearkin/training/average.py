"""What a continued training leaves: an average of the weights of its start and of its end.

Wortsman et al. 2022, Robust fine-tuning of zero-shot models (WiSE-FT), arXiv:2109.01903, eq. 1:

    weights = (1 - share) start + share end

Running statistics of batch norms are averaged as weights are. The share is chosen without labels,
by view retrieval of held-out images, or of training images where none is held out. It is 0, the
start as it was, unless another is clearly better, so that a training which spoils its start is
undone.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from nearkin.encoders.encoder import Encoder
from nearkin.evaluation.verdict import WITHOUT_LABELS
from nearkin.metrics.metric import Metric, difference

SHARES: Final = (0.25, 0.5, 0.75, 1.0)
"""Of the way from start to end, beside 0."""
IMAGES: Final = 1000  # Images, at the most, by which a share is chosen


@torch.no_grad()
def averaged(start: Encoder, end: Mapping[str, Tensor], share: float) -> Encoder:
    """Return an encoder with weights this share of the way from its own to those of `end`.

    `start` is at the image size of `end`, which are weights of its network's body.
    """
    encoder = copy.deepcopy(start)
    state = {}  # apart, as a tensor may be there under several names
    for name, tensor in encoder.backbone.body.state_dict().items():
        # What is no number of floating point is such as the count of batches of statistics.
        last = end[name].to(tensor)
        state[name] = tensor.lerp(last, share) if tensor.is_floating_point() else last
    encoder.backbone.body.load_state_dict(state)
    return encoder


@dataclass(frozen=True)
class Average:
    """A share of a training, and what it was chosen by."""

    share: float
    retrieval: Mapping[float, Metric]
    """View retrieval by share, that of the start first; none where it could not be measured."""
    images: str  # What images these are, in words

    @property
    def text(self) -> str:
        """The choice in words, with the numbers behind it."""
        if not self.retrieval:
            return "the start, since nothing can be measured on so few images"
        rates = ", ".join(f"{metric.value:.3f} at {at:g}" for at, metric in self.retrieval.items())
        what = (
            f"the start and {self.share:g} of the way from it to the last step"
            if self.share
            else "the start as it was: no average of it and the last step is clearly better"
        )
        return f"{what} ({WITHOUT_LABELS} {rates}; {self.retrieval[0.0].n:,} {self.images})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = {f"{share:g}": metric.value for share, metric in self.retrieval.items()}
        plain = {"share": self.share, "criterion": WITHOUT_LABELS}
        return plain | {"values": values, "text": self.text}


def choose_average(
    start: Encoder,
    resized: Encoder,
    end: Mapping[str, Tensor],
    measure: Callable[[Encoder], Mapping[str, Metric]],
    images: str,
) -> tuple[Encoder, Average]:
    """Return the encoder of the highest view retrieval, and the share of the training that it has.

    It is among those that are clearly above the start (the 95 % interval of the paired difference
    is); the start itself where none is. `resized` is the start at the size of the training's
    images; `measure` gives label-free metrics of an encoder, by name, on `images`.
    """
    first = measure(start).get(WITHOUT_LABELS)
    if first is None:
        return start, Average(0.0, {}, images)
    retrieval = {0.0: first}
    for share in SHARES:
        measured = measure(averaged(resized, end, share)).get(WITHOUT_LABELS)
        if measured is not None:
            retrieval[share] = measured
    better = [at for at, metric in retrieval.items() if difference(metric, first).clear > 0]
    share = max(better, key=lambda at: retrieval[at].value, default=0.0)
    chosen = averaged(resized, end, share) if share else start
    return chosen, Average(share, retrieval, images)
