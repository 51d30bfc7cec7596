"""The row of a benchmark: two figures, their ratio, and what they were measured with."""

import json
import math
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

HERE: Final = Path(__file__).parents[1]
ROOT: Final = HERE.parent
CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Row:
    """What one case has measured.

    The ratio is what the other takes over what nearkin takes: above one, nearkin takes less.
    """

    case: str
    value: float  # of nearkin; the median of the rounds
    unit: str = "s"
    against: str = ""  # what it is compared with
    other: float | None = None  # its median
    ratio: float | None = None  # the median of the ratios, round by round
    interval: tuple[float, float] | None = None  # of that median; see `interval_of`
    rounds: int = 1
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def line(self) -> str:
        """Format the row for people.

        >>> Row("step", 0.5, against="bare", other=0.4, ratio=0.8, interval=(0.7, 0.9)).line()
        'step                               0.5 s   bare 0.4, ratio 0.80 [0.70, 0.90]'
        """
        text = f"{self.case:28} {self.value:9.4g} {self.unit}"
        if self.other is not None:
            text += f"   {self.against} {self.other:.4g}, ratio {self.ratio:.2f}"
        if self.interval:
            text += " [{:.2f}, {:.2f}]".format(*self.interval)
        more = (f"{name} {_short(value)}" for name, value in self.more.items())
        return "   ".join((text, *more))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def compared(
    case: str,
    values: Sequence[float],
    others: Sequence[float],
    *,
    against: str,
    unit: str = "s",
    **more: Any,
) -> Row:
    """Compare figures of paired rounds."""
    ratios = [other / value for value, other in zip(values, others, strict=True)]
    return Row(
        case,
        median(values),
        unit,
        against,
        median(others),
        median(ratios),
        interval_of(ratios) if len(ratios) > 1 else None,
        len(ratios),
        more,
    )


def interval_of(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the narrowest interval of order statistics that covers the median so often.

    That of value k from either end misses it if fewer than k of n lie on one side, whatever the
    distribution. Of fewer than six values, no such interval reaches 95 %, and all are covered.

    >>> interval_of([1, 2, 3]), interval_of(range(9))
    ((1, 3), (1, 7))
    """
    ordered, n = sorted(values), len(values)
    beyond = [sum(math.comb(n, i) for i in range(k + 1)) / 2**n for k in range((n + 1) // 2)]
    skipped = max((k for k, tail in enumerate(beyond) if 1 - 2 * tail >= confidence), default=0)
    return ordered[skipped], ordered[n - 1 - skipped]


def record(name: str, row: Row, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that is kept of a row."""
    made = made_with(options.get("device", "cpu"))
    return {"name": name, **asdict(row), **made, "options": dict(options)}


def append(file: Path, kept: Mapping[str, Any]) -> None:
    """Append a row to a file of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(kept, default=str) + "\n")


def made_with(device: str = "cpu") -> dict[str, Any]:
    """Return the machine, the versions and the commit."""
    import torch

    from nearkin.distributed import choose_device, device_name

    gpu = "" if device == "cpu" else f"{device_name(choose_device(device))}; "
    return {
        "commit": commit(),
        "machine": gpu + cpu(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def cpu() -> str:
    """Return the name of the CPU and the instructions that torch uses of it."""
    import torch

    from nearkin.run.data import machine

    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    name = re.search(r"model name\s*: (.+)", text)
    instructions = machine(torch.device("cpu"))["instructions"]
    return f"{name[1] if name else platform.machine()}, {instructions}"


def commit() -> str:
    """Return the commit of the nearkin that is measured.

    It is that of the source which Python imports, not always that of these benchmarks; a + stands
    where files of either differ from what is committed.
    """
    import nearkin

    source = Path(nearkin.__file__).parent

    def git(folder: Path, *words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = [git(each, "status", "--porcelain", "--", ".") for each in (source, HERE)]
    return git(source, "rev-parse", "--short", "HEAD") + "+" * any(changed)
