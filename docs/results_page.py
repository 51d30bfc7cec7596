"""Write the section of docs/results.md that is made from the rows of peers.jsonl.

    PYTHONPATH=. python docs/results_page.py

`make docs` calls it. Runs that are planned and not there are shown as not run.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.peers.plan import SEEDED, SIDES, Run, Unit, plan
from benchmarks.peers.plan import rows as measured

ROOT: Final = Path(__file__).parents[1]
ROWS: Final = Path("docs/results/peers.jsonl")
PAGE: Final = Path("docs/results.md")
BEGIN: Final = "<!-- Made by `make docs` from docs/results/peers.jsonl. -->"
END: Final = "<!-- End of what is made. -->"

DATA: Final = {"cifar10": "CIFAR-10", "fashion": "Fashion-MNIST"}
BASELINES: Final = {"pixels": "raw pixels", "untrained": "untrained network"}
NOT_RUN: Final = "not run"
Row = dict[str, Any]


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


def page(text: str, rows: dict[str, Row]) -> str:
    """Return the page with the section between its marks made anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END, maxsplit=1)[1]
    return f"{before}{BEGIN}\n\n{section(rows)}\n\n{END}{after}"


def main() -> None:
    """Write the page."""
    file, rows = ROOT / PAGE, load(ROOT / ROWS)
    file.write_text(page(file.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
