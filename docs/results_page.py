"""Write the sections of docs/results.md that are made from rows of peers.jsonl and times.jsonl.

    PYTHONPATH=. python docs/results_page.py

`make docs` calls it. Runs that are planned and not there are shown as not run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.peers.plan import SEEDED, SEEDS, SIDES, Run, Unit, plan
from benchmarks.peers.plan import rows as measured

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = Path("docs/results")
PAGE: Final = Path("docs/results.md")
BEGIN: Final = "<!-- Made by `make docs` from docs/results/{}. -->"
END: Final = "<!-- End of what is made. -->"

DATA: Final = {"cifar10": "CIFAR-10", "fashion": "Fashion-MNIST"}
TIMED: Final = {
    "cifar10": "CIFAR-10",
    "caltech": "Caltech-99",
    "fashion10k": "Fashion-MNIST, 10,000 training images",
    "digits": "Digits, never used to choose `auto`",
    "omniglot": "Omniglot, never used to choose `auto`",
}
BASELINES: Final = {"pixels": "raw pixels", "untrained": "untrained network"}
NOT_RUN: Final = "not run"
Row = dict[str, Any]

ARMS: Final = ("auto", "published", "published, same network")
METRICS: Final = ("kNN top-1", "linear probe", "cluster accuracy")


def load(file: Path) -> dict[str, Row]:
    """Read the rows, by name."""
    return {row["name"]: row for row in measured(file)}


def spread(values: Sequence[float], sign: str = "", unit: str = " %") -> str:
    """Format a mean of shares in percent and, of several, their range.

    >>> spread([0.5]), spread([0.25, 0.75], "+", "")
    ('50.0 %', '+50.0 (+25.0 to +75.0)')
    """
    mean, low, high = (f"{100 * f(values):{sign}.1f}" for f in (fmean, min, max))
    return f"{mean}{unit}" if len(values) == 1 else f"{mean}{unit} ({low} to {high})"


def seeds(count: int) -> str:
    """Say how many seeds there are.

    >>> seeds(1), seeds(3)
    ('1 seed', '3 seeds')
    """
    return f"{count} seed{'s' * (count > 1)}"


def interval(value: float, low: float, high: float) -> str:
    """Format an accuracy with its interval over test images.

    >>> interval(0.646, 0.637, 0.655)
    '64.6 % [63.7, 65.5]'
    """
    return f"{100 * value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def knn(row: Row) -> str:
    """Format the kNN accuracy of a row."""
    return interval(row["knn"], row["low"], row["high"])


def cell(rows: Sequence[Row]) -> str:
    """Format the accuracy over seeds; of one seed, with its interval over test images."""
    if not rows:
        return NOT_RUN
    if len(rows) == 1:
        return f"{knn(rows[0])}, 1 seed"
    return f"{spread([row['knn'] for row in rows])}, {seeds(len(rows))}"


def difference(sides: Sequence[Sequence[Row]]) -> str:
    """Format how many points the first side is better, seed by seed."""
    first, second = ({row["seed"]: row["knn"] for row in side} for side in sides)
    both = [first[seed] - second[seed] for seed in first if seed in second]
    return spread(both, "+", "") if both else ""


def of_both(sides: Sequence[Sequence[Row]], column: str, form: str) -> str:
    """Format the means of a column of both sides."""
    means = [format(fmean(row[column] for row in rows), form) if rows else "-" for rows in sides]
    return "; ".join(means) if any(sides) else ""


def line(name: str, sides: Sequence[Sequence[Row]]) -> list[str]:
    """Return the cells of a method: accuracies, their difference, epochs and speeds."""
    accuracies = [cell(rows) for rows in sides]
    more = [of_both(sides, "epochs", ".1f"), of_both(sides, "images_per_second", ".0f")]
    return [name, *accuracies, difference(sides), *more]


def table(runs: Sequence[Run], rows: dict[str, Row], baselines: Iterable[Run]) -> str:
    """Return the table of the runs of one data set and budget."""
    header = ["method, network", *SIDES, "difference", "epochs", "images/s"]
    lines = [header, ["---"] * len(header)]
    for method, network in dict.fromkeys((run.method, run.network) for run in runs):
        sides = [
            [
                rows[run.name]
                for run in runs
                if (run.method, run.network, run.side) == (method, network, side)
                and run.name in rows
            ]
            for side in SIDES
        ]
        lines.append(line(f"{method}, {network}", sides))
    for run in baselines:
        shown = knn(rows[run.name]) if run.name in rows else NOT_RUN
        network = "" if run.method == "pixels" else f", {run.network}"
        name = f"{BASELINES[run.method]}{network} (baseline)"
        lines.append([name, shown, *[""] * (len(header) - 2)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def made_with(rows: Sequence[Row]) -> str:
    """Say on what, by what, and how undisturbed the trainings were."""
    if not rows:
        return "None of them has been run."
    used = sorted({" ".join(map(" ".join, row["versions"].items())) for row in rows})
    commits = sorted({row["commit"] for row in rows})
    timed = [row for row in rows if row["unit"] == "s"]
    parts = [f"Versions: {'; '.join(used)}. Commits: {', '.join(commits)}."]
    for machine in sorted({row["machine"] for row in rows}):
        of = [row for row in rows if row["machine"] == machine and row["side"] == "nearkin"]
        kinds = sorted({row["settings"]["precision"] for row in of})
        names = ", ".join(row["name"].removesuffix("-nearkin") for row in of)
        parts.append(f"On {machine}, where nearkin computes in {' and '.join(kinds)}: {names}.")
    parts += _longer(timed)
    for clock in sorted({row["clock"] for row in timed}):
        of = [row for row in timed if row["clock"] == clock]
        spent = [row["cpu_seconds" if clock == "cpu" else "seconds"] for row in of]
        share = min(row["cpu_share"] for row in of)
        parts.append(
            f"By the {'CPU' if clock == 'cpu' else 'wall'} clock, {len(of)} trainings took "
            f"{min(spent):.0f} to {max(spent):.0f} s and had {share:.2f} of their core or more."
        )
    return "\n".join(parts)


def _longer(timed: list[Row]) -> list[str]:
    """Return a line on pairs of which a side took a tenth more than its seconds."""
    spent = {
        row["name"]: row["cpu_seconds" if row["clock"] == "cpu" else "seconds"] for row in timed
    }
    pairs = dict.fromkeys(
        row["name"].rpartition("-")[0] for row in timed if spent[row["name"]] > 1.1 * row["budget"]
    )
    return [
        f"Longer than planned, nearkin and lightly: {pair}, "
        f"{spent[f'{pair}-nearkin']:.0f} and {spent[f'{pair}-lightly']:.0f} s."
        for pair in pairs
    ]


def section(rows: dict[str, Row]) -> str:
    """Return the whole section."""
    runs = [run for pair in plan() for run in pair]
    baselines = [run for run in runs if run.side == "baseline"]
    trained = [run for run in runs if run.side != "baseline"]
    parts = [INTRODUCTION]
    groups: dict[tuple[str, float, Unit], list[Run]] = {}
    for run in trained:
        groups.setdefault((run.data, run.budget, run.unit), []).append(run)
    for (data, budget, unit), group in groups.items():
        each = "seconds of one core each" if unit == "s" else "epochs each"
        parts.append(f"### {DATA[data]}, {budget:g} {each}")
        parts.append(table(group, rows, [run for run in baselines if run.data == data]))
    done = [rows[run.name] for run in trained if run.name in rows]
    parts.append(f"{len(done)} of {len(trained)} trainings are here. {made_with(done)}")
    return "\n\n".join(parts)


INTRODUCTION: Final = f"""\
    python -m benchmarks peers --data FOLDER     # cifar10.npz and fashion_mnist.npz

`nearkin train` with `auto` settings beside [lightly](https://github.com/lightly-ai/lightly) with
the settings of its own CIFAR-10 benchmark: the same images, the same seconds of one core, side by
side, one evaluator. `small` is nearkin's small network (1.2 M parameters), on both sides;
`resnet18` is each side's own ResNet-18 for small images. Each side measures its speed first and
plans its schedule for the steps that fit. Imports, opening the data and evaluation do not count.
nearkin computes in bfloat16 where `auto` does; lightly in float32, as its benchmark.
[benchmarks/peers](../benchmarks/peers/README.md) has all conditions.

Accuracy is kNN: k 200, temperature 0.1, cosine, 50,000 training images (Fashion-MNIST 60,000),
10,000 test images, last step. For one seed, a cell has the 95 % interval over test images in
brackets; for several, the mean and the range in parentheses. Differences are in points, between
runs of one seed. Epochs and images per second are nearkin's, then lightly's. At equal epochs
({", ".join(SEEDED)}), batches and rates are still each side's own."""


@dataclass(frozen=True)
class Timed:
    """A training of a given time."""

    data: str
    method: str
    minutes: int
    threads: int
    seed: int = 0
    arm: str = "auto"

    @property
    def name(self) -> str:
        """A name for files, and the key of its row.

        >>> Timed("digits", "simclr", 2, 1, 0, "published, same network").name
        'digits-simclr-2m-1t-0-published-same-network'
        """
        arm = self.arm.replace(",", "").replace(" ", "-")
        return f"{self.data}-{self.method}-{self.minutes}m-{self.threads}t-{self.seed}-{arm}"


def timed_plan() -> list[Timed]:
    """Return all trainings of a given time, the most important first."""
    runs = [Timed("cifar10", "simclr", minutes, 2, seed) for minutes in (15, 60) for seed in SEEDS]
    runs += [Timed("cifar10", method, 30, 1) for method in ("byol", "nnclr")]
    runs += [Timed("cifar10", "simclr", 45, 1), Timed("cifar10", "instdisc", 30, 1)]
    for data, minutes in (("digits", 2), ("omniglot", 3)):
        runs += [Timed(data, "simclr", minutes, 1, seed, arm) for seed in SEEDS for arm in ARMS]
    runs += [Timed("caltech", "simclr", 30, 2, seed) for seed in SEEDS]
    runs += [Timed("fashion10k", "simclr", 15, 2, seed) for seed in SEEDS]
    runs += [Timed("fashion10k", "simclr", 15, 1)]
    return runs


def timed_cell(values: Sequence[Sequence[float]]) -> str:
    """Format a metric: of one run with its interval, of several seeds their mean and range.

    >>> timed_cell([[0.5, 0.4, 0.6]]), timed_cell([[0.5, 0.4, 0.6], [0.7, 0.6, 0.8]])
    ('50.0 % [40.0, 60.0]', '60.0 % (50.0 to 70.0)')
    """
    return interval(*values[0]) if len(values) == 1 else spread([value for value, _, _ in values])


def timed_line(runs: Sequence[Timed], rows: dict[str, Row]) -> list[str]:
    """Return the cells of the runs that differ in their seed only."""
    of = [rows[run.name] for run in runs if run.name in rows]
    first = runs[0]
    cores = "1 core" if first.threads == 1 else f"{first.threads} cores"
    arm = first.method if first.arm == "auto" else first.arm
    name = f"{arm}, {first.minutes} min of {cores}"
    if not of:
        return [name, f"0 of {len(runs)}", NOT_RUN, *[""] * (1 + len(METRICS))]
    spent = [row["cpu_seconds"] / 60 for row in of if row.get("cpu_seconds")]
    return [
        name,
        f"{len(of)} of {len(runs)}",
        f"{fmean(row['epochs'] for row in of):.0f}",
        f"{fmean(spent):.0f}" if spent else "",
        *(timed_cell([row["measures"]["encoder"][metric] for row in of]) for metric in METRICS),
    ]


def timed_table(runs: Sequence[Timed], rows: dict[str, Row]) -> str:
    """Return the table of one data set, with its baselines."""
    header = ["run", "seeds", "epochs", "CPU minutes", *METRICS]
    lines = [header, ["---"] * len(header)]
    alike: dict[tuple[str, str, int, int], list[Timed]] = {}
    for run in runs:
        alike.setdefault((run.arm, run.method, run.minutes, run.threads), []).append(run)
    lines += [timed_line(group, rows) for group in alike.values()]
    done = [rows[run.name] for run in runs if run.name in rows]
    # Of `auto` alone: others have another network. Baselines depend on the seed by rounding only.
    for table in BASELINES if done else ():
        values = next(row["measures"][table] for row in done if row["arm"] == "auto")
        cells = [timed_cell([values[metric]]) for metric in METRICS]
        lines.append([f"{BASELINES[table]} (baseline)", "", "", "", *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def timed_section(rows: dict[str, Row]) -> str:
    """Return the section of trainings that have a time."""
    parts = [TIMED_INTRODUCTION]
    for data, title in TIMED.items():
        parts += [f"### {title}", timed_table([r for r in timed_plan() if r.data == data], rows)]
    done = [rows[run.name] for run in timed_plan() if run.name in rows]
    commits, machines = ({row[key] for row in done} for key in ("commit", "machine"))
    torch = {row["versions"]["torch"] for row in done}
    parts.append(
        f"{len(done)} of {len(timed_plan())} trainings are here. Commits: {_listed(commits)}. "
        f"Machine: {_listed(machines)}. torch {_listed(torch)}."
    )
    return "\n\n".join(parts)


def _listed(values: Iterable[str]) -> str:
    return ", ".join(sorted(values))


TIMED_INTRODUCTION: Final = """\
    python benchmarks/reproduce/times.py OUT --cifar10 cifar10.npz --caltech caltech99.tar \\
        --fashion10k fashion10k.npz --omniglot omniglot/      # at commit a40ae3c

runs, among others,

    nearkin train cifar10.npz --max-time 15m
    nearkin train cifar10.npz --method byol --max-time 30m    # on one core
    nearkin train caltech99.tar --max-time 30m

Only the time and the method are given. The time is that of the whole run with its evaluation;
baselines come on top. `published` is recipe:cifar10/simclr (ResNet-18, LARS) for as long as the
same time allows; `published, same network` has the network of `auto`. Other work ran on the
machine, which makes a run longer than planned, but not better.

Test split (digits and Omniglot: a fifth held out by `--val 0.2`), last epoch; kNN at temperature
0.1 and k 200, or 20 below 10,000 training images. For one seed, cells have the 95 % interval over
test images in brackets; for several, the mean and the range in parentheses."""


def page(text: str, rows: dict[str, Row], timed: dict[str, Row]) -> str:
    """Return the page with the sections between their marks made anew."""
    for name, made in (("peers.jsonl", section(rows)), ("times.jsonl", timed_section(timed))):
        begin = BEGIN.format(name)
        before, rest = text.split(begin)
        after = rest.split(END, maxsplit=1)[1]
        text = f"{before}{begin}\n\n{made}\n\n{END}{after}"
    return text


def main() -> None:
    """Write the page."""
    file = ROOT / PAGE
    rows = (load(ROOT / RESULTS / name) for name in ("peers.jsonl", "times.jsonl"))
    file.write_text(page(file.read_text(encoding="utf-8"), *rows), encoding="utf-8")


if __name__ == "__main__":
    main()
