"""The arms of each paper's ablation: what differs between them, and nothing else."""

import math
from dataclasses import dataclass, field, replace

from nearkin.config import Value


@dataclass(frozen=True)
class Arm:
    """A method with its options."""

    method: str
    options: dict[str, Value] = field(default_factory=dict)
    batch_size: int = 128

    def but(self, **options: Value) -> "Arm":
        """Return the same arm with other options."""
        return replace(self, options=self.options | options)


@dataclass(frozen=True)
class Panel:
    """Arms of one panel: lines of points, by name of the point."""

    axis: str
    """The option that differs between points."""
    lines: dict[str, dict[str, Arm]]

    @property
    def arms(self) -> dict[str, Arm]:
        """Return all arms, by line and point."""
        return {
            self.name(line, point): arm
            for line, points in self.lines.items()
            for point, arm in points.items()
        }

    @staticmethod
    def name(line: str, point: str) -> str:
        """Return the name of an arm in tables."""
        return f"{line}: {point}" if line else point


def half_life(momentum: float) -> float:
    """Return the half-life of a momentum encoder in steps.

    >>> half_life(0.5), round(half_life(0.99)), half_life(0.0), half_life(1.0)
    (1.0, 69, 0.0, inf)
    """
    if momentum in (0.0, 1.0):
        return math.inf if momentum else 0.0
    return math.log(0.5) / math.log(momentum)


def with_half_life(momentum: float) -> str:
    """Format a momentum with its half-life in steps.

    >>> with_half_life(0.999)
    '0.999 (693)'
    """
    return f"{momentum:g} ({half_life(momentum):.0f})"


SIMSIAM = Arm("simsiam", {"dim": 256, "num_layers": 2, "predictor_dim": 64})
BYOL = Arm("byol", {"dim": 64, "hidden_dim": 256, "rising_momentum": False})
MOCO = Arm(
    "moco",
    {"dim": 64, "hidden_dim": 128, "queue_size": 4096, "momentum": 0.99, "bn_groups": 4},
)
BANK = Arm("moco_memory_bank", {"dim": 64, "hidden_dim": 128})
END_TO_END = Arm("moco_end_to_end", {"dim": 64, "hidden_dim": 128})
INSTDISC = Arm("instdisc", {"dim": 64})
SOFTER = INSTDISC.but(temperature=0.2)
SWAV = Arm("swav", {"dim": 64, "hidden_dim": 128, "num_prototypes": 100, "queue_size": 1024})
NNCLR = Arm("nnclr", {"dim": 64, "hidden_dim": 128, "predictor_dim": 256, "support_size": 4096})

GROUP = 32
"""Images that share their batch statistics in MoCo and its end-to-end baseline."""


def of_batch(arm: Arm, batch_size: int) -> Arm:
    """Return the arm with another batch size, and groups of batch statistics of the same size."""
    return replace(arm.but(bn_groups=batch_size // GROUP), batch_size=batch_size)


PAPERS: dict[str, tuple[Panel, ...]] = {
    "simsiam": (
        Panel(
            "SimSiam",
            {
                "": {
                    "full": SIMSIAM,
                    "no predictor": SIMSIAM.but(predictor=False),
                    "no stop-gradient": SIMSIAM.but(stop_gradient=False),
                    "neither": SIMSIAM.but(predictor=False, stop_gradient=False),
                }
            },
        ),
    ),
    "byol": (
        Panel(
            "momentum (half-life in steps)",
            {"": {with_half_life(m): BYOL.but(momentum=m) for m in (1.0, 0.999, 0.99, 0.9, 0.0)}},
        ),
    ),
    "moco": (
        Panel(
            "momentum (half-life in steps)",
            {"": {with_half_life(m): MOCO.but(momentum=m) for m in (0.0, 0.9, 0.99, 0.999)}},
        ),
        Panel(
            "dictionary size",
            {
                "end-to-end": {str(k): of_batch(END_TO_END, k) for k in (64, 128, 256, 512)},
                "memory bank": {str(k): BANK.but(num_negatives=k) for k in (128, 512, 2048, 4096)},
                "queue": {str(k): MOCO.but(queue_size=k) for k in (128, 512, 2048, 4096)},
            },
        ),
    ),
    "instdisc": (
        Panel(
            "loss",
            {
                "": {
                    "parametric": Arm("instdisc_parametric", {"dim": 64}),
                    "non-parametric": INSTDISC.but(loss="softmax"),
                    **{f"NCE, m = {m}": INSTDISC.but(num_noise=m) for m in (1, 10, 512, 4096)},
                }
            },
        ),
        Panel(
            "loss, temperature 0.2",
            {
                "temperature 0.2": {
                    "non-parametric": SOFTER.but(loss="softmax"),
                    **{f"NCE, m = {m}": SOFTER.but(num_noise=m) for m in (1, 10, 512, 4096)},
                }
            },
        ),
    ),
    "swav": (
        Panel(
            "Sinkhorn iterations",
            {"": {str(count): SWAV.but(num_iterations=count) for count in (1, 3)}},
        ),
    ),
    "nnclr": (
        Panel(
            "support set",
            {"": {str(size): NNCLR.but(support_size=size) for size in (128, 512, 4096)}},
        ),
        Panel(
            "nearest neighbors drawn from, support set 4096",
            {"top": {"1": NNCLR, **{str(k): NNCLR.but(num_neighbors=k) for k in (8, 64)}}},
        ),
    ),
}
"""The ablations, by paper."""
