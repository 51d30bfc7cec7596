"""Rank trainings without labels, and score the ranking by the labels: docs/choice.md.

    python benchmarks/choice.py run DATA_DIR -o docs/results/choice.jsonl [--minutes 60]
    python benchmarks/choice.py table docs/results/choice.jsonl

`run` trains methods x settings x data sets in a random order, good settings and poor ones, and
appends a row for each encoder: its settings, the label-free measures of its features and of its
embedding, and its kNN. The same command continues after an interruption. DATA_DIR holds
cifar10.npz and fashion10k.npz. `table` prints what the page shows. Labels are read for kNN only.
"""

import argparse
import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from PIL import Image
from scipy import stats
from torch import Tensor, nn
from typing_extensions import override

from nearkin.config import Criterion, TrainConfig
from nearkin.data.opening import open_images
from nearkin.data.split import Split, split_images
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.projector import Projected
from nearkin.errors import NearkinError
from nearkin.evaluation.choice import CRITERIA
from nearkin.evaluation.embeddings import encode_images
from nearkin.evaluation.evaluate import label_free
from nearkin.evaluation.measures import knn, num_neighbors
from nearkin.method import Method
from nearkin.methods import METHODS
from nearkin.networks.branch import Backbone, as_backbone
from nearkin.run.settings import augment_for, resolve, stored_views
from nearkin.tables import read_csv
from nearkin.training.fit import optimizer_for, training_steps
from nearkin.training.session import build
from nearkin.types import UNKNOWN

CPU: Final = torch.device("cpu")
IMAGES: Final = 3_500  # Of each data set, with those that kNN is scored on
HELD_OUT: Final = 0.6
RANKED_BY: Final = 500  # Images of both parts that the label-free measures are of
SIZES: Final = {"cifar10": 12, "fashion10k": 12, "digits": 8}  # Side of the images in pixels
EPOCHS: Final = {"cifar10": 4, "fashion10k": 4, "digits": 10}
PARTS: Final = (0.25, 0.5, 0.75)  # Of a training, after which its checkpoints are measured too
FOLLOWED: Final = ("seed 1",)  # Arms whose checkpoints are measured

ARMS: Final[dict[str, dict[str, Any]]] = {
    "auto": {},
    "seed 1": {"seed": 1},
    "rate x 10": {"lr": 10.0},
    "rate x 100": {"lr": 100.0},
    "rate / 30": {"lr": 1 / 30},
    "decay x 1000": {"weight_decay": 1000.0},
    "a quarter as long": {"epochs": 0.25},
    "batch 256": {"batch_size": 256},
    "shifts only": {"augment": "ncl_cifar"},
    "strong colors": {"augment": "simclr"},
}
"""Settings that differ from `auto`; those that are multiples of it are floats."""
OWN_ARMS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "simclr": {"temperature 0.02": {"temperature": 0.02}, "temperature 2": {"temperature": 2.0}},
    "moco": {"temperature 0.02": {"temperature": 0.02}, "temperature 1": {"temperature": 1.0}},
    "simsiam": {
        "no stop-gradient": {"stop_gradient": False},
        "no predictor": {"predictor": False},
    },
    "byol": {"momentum 0": {"momentum": 0.0}, "momentum 0.999": {"momentum": 0.999}},
    "vicreg": {"no variance term": {"variance": 0.0}, "no covariance term": {"covariance": 0.0}},
}
"""Options of the method that differ from `auto`."""

LAYERS: Final = ("features", "embedding")
FEWEST: Final = 5  # Runs of a method that a statistic within methods takes
DRAWS: Final = 1_000

Row = dict[str, Any]


def plan(seed: int = 0) -> list[tuple[str, str, str]]:
    """Return data set, method and arm of every training, in a random order, the slowest last."""
    trainings = [
        (data, method, arm)
        for data in SIZES
        for method, own in OWN_ARMS.items()
        for arm in (*ARMS, *own)
    ]
    random.Random(seed).shuffle(trainings)
    return sorted(trainings, key=lambda training: training[1] == "vicreg")


def parts_of(data: str, folder: Path) -> Split:
    """Read some images of a data set, made small once and for all, and hold some out."""
    if data == "digits":
        return split_images(open_images(data), HELD_OUT, 0)
    with np.load(folder / f"{data}.npz") as stored:
        pixels, labels = stored["x_train"][:IMAGES], stored["y_train"][:IMAGES]
    side = (SIZES[data], SIZES[data])
    small = [Image.fromarray(each).resize(side, Image.Resampling.LANCZOS) for each in pixels]
    return split_images(open_images((np.stack(list(map(np.asarray, small))), labels)), HELD_OUT, 0)


def config_for(data: str, method: str, arm: str, parts: Split) -> TrainConfig:
    """Return the `auto` settings of a small network, changed by the arm."""
    changed, options = ARMS.get(arm, {}), OWN_ARMS[method].get(arm, {})
    given = {name: value for name, value in changed.items() if not isinstance(value, float)}
    epochs = round(EPOCHS[data] * changed.get("epochs", 1))
    asked = TrainConfig(
        method=method, backbone="tiny", image_size=SIZES[data], epochs=epochs,
        workers=0, options=options, **{"batch_size": 128, **given},
    )  # fmt: skip
    usual = resolve(asked, parts.train, CPU)
    scaled = {
        name: getattr(usual, name) * changed[name]
        for name in ("lr", "weight_decay")
        if name in changed
    }
    return replace(usual, **scaled)


class Remembering(nn.Module):
    """A network that computes the features of a batch only once: both layers are of the same."""

    def __init__(self, network: Backbone) -> None:
        super().__init__()
        self.network = network
        self.known: dict[bytes, Tensor] = {}

    @override
    def forward(self, images: Tensor) -> Tensor:
        key = sha256(images.contiguous().numpy().tobytes()).digest()
        if key not in self.known:
            self.known[key] = self.network(images)
        return self.known[key]


def measured(method: Method[Any], data: str, parts: Split) -> Row:
    """Return the label-free measures of features and embedding, and kNN of the features."""
    views = stored_views(augment_for(METHODS["simclr"].defaults, parts.images, SIZES[data]))
    some = parts.images.spread(RANKED_BY)
    unlabeled = replace(some, labels=np.full(len(some), UNKNOWN))
    settings: dict[str, Any] = {"seed": 0, "workers": 0, "augment": views, "device": CPU}
    backbone, projector = deepcopy((method.backbone, method.online.projector))  # mode and all
    encoder = Encoder(backbone, SIZES[data], {})
    body = as_backbone(Remembering(backbone), SIZES[data])

    def free(network: nn.Module) -> dict[str, float]:
        ranked = Encoder(as_backbone(network, SIZES[data]), SIZES[data], {})
        measures = label_free(ranked, unlabeled, **settings)
        return {name: round(measure.value, 5) for name, measure in measures.items()}

    bank, queries = (
        encode_images(encoder, each, device=CPU, workers=0) for each in (parts.train, parts.test)
    )
    score = knn(bank, queries, k=num_neighbors(len(bank)))
    return {
        "features": free(body),
        "embedding": free(Projected(body, projector)),
        "knn": round(score.value, 5),
        "low": round(score.low or 0.0, 5),
        "high": round(score.high or 0.0, 5),
        "protocol": score.protocol,
    }


def rows_of(data: str, name: str, arm: str, parts: Split, commit: str) -> Iterator[Row]:
    """Train once; yield a row at the end and, of the arms that are followed, on the way."""
    config = config_for(data, name, arm, parts)
    method, batches = build(config, parts.train, CPU)
    total = int(config.epochs) * batches.order.steps_per_epoch
    due = {round(part * total): part for part in (PARTS if arm in FOLLOWED else ())} | {total: 1.0}
    settings = {
        key: getattr(config, key)
        for key in ("seed", "epochs", "batch_size", "optimizer", "lr", "weight_decay", "options")
    }
    started = time.process_time()
    row: Row = {"data": data, "method": name, "arm": arm, "settings": settings, "commit": commit}
    try:
        steps = training_steps(
            config, method, optimizer_for(method, config), batches.between(0, total),
            start=0, total=total,
        )  # fmt: skip
        for done, _ in steps:
            if done in due:
                spent = round(time.process_time() - started, 1)
                yield row | {"progress": due[done], "cpu": spent} | measured(method, data, parts)
    except NearkinError as error:  # a divergence, which needs no measure to be seen
        yield row | {"progress": 1.0, "failed": str(error)}


def run(options: argparse.Namespace) -> None:
    """Take the missing trainings, for so many minutes."""
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * options.minutes
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    parts = {data: parts_of(data, options.data) for data in SIZES}
    done = {(row["data"], row["method"], row["arm"]) for row in read(options.output)}
    for training in plan():
        if training in done or time.monotonic() > end:
            continue
        rows = list(rows_of(*training, parts[training[0]], commit))
        with options.output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print(*training, rows[-1].get("knn"), rows[-1].get("cpu"), flush=True)


def read(path: Path) -> list[Row]:
    """Read the rows, if there are any."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Ranked(NamedTuple):
    """How good a criterion finds some runs, and how good they are."""

    quality: np.ndarray
    knn: np.ndarray
    method: np.ndarray

    def at(self, rows: np.ndarray) -> "Ranked":
        """Return these rows, any number of times each."""
        return Ranked(*(column[rows] for column in self))


Statistic = Callable[[Ranked], float]


def constant(runs: Ranked) -> bool:
    """Return whether one side does not vary, as in a draw of the same run again and again."""
    return bool(min(np.ptp(runs.quality), np.ptp(runs.knn)) == 0)


def spearman(runs: Ranked) -> float:
    """Return the rank correlation; 0 if one side is constant."""
    ranks = stats.rankdata(runs.quality), stats.rankdata(runs.knn)
    return 0.0 if constant(runs) else float(np.corrcoef(*ranks)[0, 1])


def kendall(runs: Ranked) -> float:
    """Return tau-b; 0 if one side is constant."""
    return 0.0 if constant(runs) else float(stats.kendalltau(runs.quality, runs.knn).statistic)


def regret(runs: Ranked) -> float:
    """Return the kNN that is lost by taking the run that the criterion finds best."""
    return float(runs.knn.max() - runs.knn[runs.quality.argmax()])


def blind(runs: Ranked) -> float:
    """Return the kNN that is lost on average by taking any run."""
    return float(runs.knn.max() - runs.knn.mean())


def within(of: Statistic) -> Statistic:
    """Return the mean of a statistic over the methods that have enough runs."""

    def mean(runs: Ranked) -> float:
        parts = (runs.at(np.flatnonzero(runs.method == name)) for name in OWN_ARMS)
        return float(np.mean([of(part) for part in parts if len(part.knn) >= FEWEST] or [0.0]))

    return mean


def ranked(rows: Sequence[Row], layer: str, criterion: Criterion) -> Ranked:
    """Return what a criterion says of the rows; of those without its measure, the worst."""
    name, quality = CRITERIA[criterion]
    values = [quality(row[layer][name]) if name in row[layer] else -1e9 for row in rows]
    return Ranked(
        np.array(values),
        np.array([row["knn"] for row in rows]),
        np.array([row["method"] for row in rows]),
    )


def cell(title: str, runs: Ranked, of: Statistic) -> str:
    """Return a statistic with its 95 % percentile interval over draws of runs."""
    rng = np.random.default_rng(0)
    draws = [of(runs.at(rng.integers(len(runs.knn), size=len(runs.knn)))) for _ in range(DRAWS)]
    low, high = np.quantile(draws, [0.025, 0.975])
    digits = 3 if "regret" in title else 2
    return f"{of(runs):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def table(options: argparse.Namespace) -> None:
    """Print the tables of the page."""
    rows = [row for row in read(options.rows) if "knn" in row]
    ends = {data: [r for r in rows if r["data"] == data and r["progress"] == 1] for data in SIZES}
    for data, some in ends.items():
        knn = sorted(row["knn"] for row in some)
        low, mid, high = knn[0], float(np.median(knn)), knn[-1]
        print(f"{data}: {len(some)} runs, kNN {low:.3f} to {high:.3f}, median {mid:.3f}")
    upper = {
        data: [row for row in some if row["knn"] >= np.median([r["knn"] for r in some])]
        for data, some in ends.items()
    }
    print_table("Spearman", ends, spearman, LAYERS)
    print_table("Kendall", ends, kendall)
    print_table("Spearman within a method, mean", ends, within(spearman))
    print_table("Spearman in the upper half", upper, spearman)
    print_table("regret", ends, regret, LAYERS)
    print_table("regret within a method, mean", ends, within(regret))
    print_checkpoints(rows)
    print_choices(ends)
    print_recorded(options.rows.parents[1])


def print_table(
    title: str,
    rows: Mapping[str, Sequence[Row]],
    of: Statistic,
    layers: Sequence[str] = LAYERS[:1],
) -> None:
    """Print a row for each criterion and layer, a column for each data set, and their mean."""
    print(f"\n| {title} | {' | '.join(rows)} | mean |\n|{'---|' * (len(rows) + 2)}")
    for layer in layers:
        for criterion in CRITERIA:
            print_line(title, f"{criterion}, {layer}", of, each_ranked(rows, layer, criterion))
    if "regret" in title:
        mean = within(blind) if "within" in title else blind
        print_line(title, "any run", mean, each_ranked(rows, LAYERS[0], "rankme"))


def each_ranked(
    rows: Mapping[str, Sequence[Row]], layer: str, criterion: Criterion
) -> list[Ranked]:
    """Return what a criterion says of the runs of each data set."""
    return [ranked(some, layer, criterion) for some in rows.values()]


def print_line(title: str, name: str, of: Statistic, data: Sequence[Ranked]) -> None:
    """Print a statistic of each data set, with intervals, and the mean."""
    cells = " | ".join(cell(title, runs, of) for runs in data)
    print(f"| {name} | {cells} | {np.mean([of(runs) for runs in data]):.3f} |")


def print_choices(rows: Mapping[str, Sequence[Row]]) -> None:
    """Print which run each criterion takes, by its features, beside the best and the worst."""
    for data, some in rows.items():
        order = sorted(some, key=lambda row: -float(row["knn"]))
        chosen = {"best": order[0], "worst": order[-1]}
        for criterion in CRITERIA:
            chosen[criterion] = some[int(ranked(some, "features", criterion).quality.argmax())]
        print(f"\n{data}")
        for name, row in chosen.items():
            place = order.index(row) + 1
            values = ", ".join(
                f"{k} {row['features'].get(k, 0):.3g}" for k, _ in CRITERIA.values()
            )
            print(
                f"{name}: {row['method']}, {row['arm']}: kNN {row['knn']:.3f}, {place}., {values}"
            )


def print_recorded(docs: Path) -> None:
    """Print the same of the effective rank in runs that were recorded before, for other ends."""
    files = {"embedding": "effective_rank", "features": "effective_rank_features"}
    for path in (*sorted(docs.glob("health/[cf]*.csv")), *sorted(docs.glob("ablations/*.csv"))):
        rows = [row for row in read_csv(path) if row.get("knn") and row["arm"] != "untrained"]
        for layer, column in files.items():
            known = [row for row in rows if row.get(column)]
            if known:
                runs = Ranked(
                    np.array([float(row[column]) for row in known]),
                    np.array([float(row["knn"]) for row in known]),
                    np.array([row.get("method", path.stem) for row in known]),
                )
                print(f"| {path.parent.name}/{path.stem} | {layer} | {len(known)} |", end=" ")
                print(f"{cell('Spearman', runs, spearman)} | {cell('regret', runs, regret)} |")


def print_checkpoints(rows: Sequence[Row]) -> None:
    """Print the kNN that is lost by taking a run's checkpoint by a criterion, or the last."""
    trainings: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["arm"] in FOLLOWED:
            trainings.setdefault((row["data"], row["method"], row["arm"]), []).append(row)
    whole = [some for some in trainings.values() if len(some) == len(PARTS) + 1]
    last = [max(r["knn"] for r in some) - some[-1]["knn"] for some in whole]
    print(
        f"\n{len(whole)} trainings with {len(PARTS) + 1} checkpoints; regret of the last", end=" "
    )
    print(f"{np.mean(last):.4f}")
    for criterion in CRITERIA:
        for layer in LAYERS:
            lost = [regret(ranked(some, layer, criterion)) for some in whole]
            print(f"| {criterion} | {layer} | {np.mean(lost):.4f} | {max(lost):.4f} |")


def main() -> None:
    """Train, or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(required=True)
    trained = commands.add_parser("run")
    trained.add_argument("data", type=Path)
    trained.add_argument("-o", "--output", type=Path, required=True)
    trained.add_argument("--minutes", type=float, default=60.0)
    trained.set_defaults(do=run)
    shown = commands.add_parser("table")
    shown.add_argument("rows", type=Path)
    shown.set_defaults(do=table)
    options = parser.parse_args()
    options.do(options)


if __name__ == "__main__":
    main()
