"""The audit of a split: everything that was found, as values, lines, rows and a repaired split."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Shaped
from typing_extensions import override

from nearkin.auditing.data import Audited
from nearkin.auditing.labels import LabelCheck, check_labels
from nearkin.auditing.leaks import Leaks, find_leaks
from nearkin.auditing.price import FITTED, Price, price
from nearkin.auditing.quality import BadQuality, find_bad
from nearkin.auditing.sources import Proposal, find_sources
from nearkin.data.duplicates import Groups, merged, pairs_of
from nearkin.errors import DataError, UsageError
from nearkin.evaluation.column import ColumnTest, Values, column_test, divided
from nearkin.pace import ProgressCallback, count
from nearkin.report.page.blocks import (
    PAIR_SIDE,
    Chart,
    Page,
    Pairs,
    Paragraphs,
    Table,
    Tile,
    Tiles,
)
from nearkin.result import Result, Row
from nearkin.text import aligned, as_text
from nearkin.types import UNLABELED

SHOWN: Final = 48  # Images of a list on the page
BESIDE: Final = "On the left a test image, on the right the training image, with their cosine."
PRICE: Final = ("classifier", "all test images", "without those that leak", "owed to leaks")


@dataclass(frozen=True, eq=False, repr=False)
class Audit(Result):
    """What a split hides."""

    audited: Audited
    leaks: Leaks
    proposals: tuple[Proposal, ...]
    groups: Groups  # Of all images: duplicates, groups that the data name, and kept proposals
    price: Price | None  # None without labels, or where it is left out
    labels: LabelCheck | None  # The same
    quality: tuple[BadQuality, ...]  # None are known of vectors
    column: ColumnTest | None  # Of the column that is to be ignored
    left_out: Mapping[str, str]  # What could not be measured, and why

    @property
    def repaired(self) -> Shaped[np.ndarray, " n"]:
        """The part of each image once no group is in both parts.

        A group goes to the part that most of its images are in, on a draw to the training part.
        """
        votes = np.bincount(self.groups, np.where(self.audited.is_test, 1.0, -1.0))
        return np.where(votes[self.groups] > 0, "test", "train")

    @property
    def moved(self) -> int:
        """How many images change parts, so that no group is in both."""
        return int((self.repaired != self.audited.embeddings.splits).sum())

    @property
    def findings(self) -> list[Row]:
        """A row per finding: the image, its part, the kind, what it is about, and how sure."""
        embeddings = self.audited.embeddings
        names = [as_text(name) for name in embeddings.paths]

        def row(at: int, finding: str, of: str, value: float) -> Row:
            part = str(embeddings.splits[at])
            return {"path": names[at], "split": part, "finding": finding, "of": of, "value": value}

        rows = [
            row(leak.test, f"leak: {leak.why}", names[leak.train], round(leak.cosine, 4))
            for leak in self.leaks.found
        ]
        for doubt in self.labels.doubts if self.labels else ():
            of, by = embeddings.classes[doubt.other], "neighbors"
            if doubt.duplicate != UNLABELED:
                of, by = f"{of}, {names[doubt.duplicate]}", "duplicate"
            rows.append(row(doubt.row, f"label: {by}", of, doubt.score))
        return rows + [row(bad.row, f"image: {bad.kind}", "", bad.value) for bad in self.quality]

    def page(self, data: str) -> Page:
        """Return the page of an audit of `data`, whose images have no pixels yet."""
        (_, (lead,)), *facts = self._facts()
        images, embeddings = self.audited.images, self.audited.embeddings
        paths, labels, classes = embeddings.paths, embeddings.labels, embeddings.classes
        cost, curve = tuple[Table, ...](), tuple[Chart, ...]()
        if self.price is not None:
            note = "95 % intervals; the last column is a difference on the same test images."
            rows = tuple(self.price.rows())
            cost = (Table("Accuracy with leaks and without", PRICE, rows, note),)
            curve = self.price.charts()
        leaks = []
        for leak in self.leaks.found[:SHOWN]:
            left, right = (Tile(paths[row], side=PAIR_SIDE) for row in (leak.test, leak.train))
            leaks.append((left, right, f"{leak.cosine:.4f}", leak.why))
        checked = []
        for doubt in self.labels.doubts[:SHOWN] if self.labels else ():
            change = f"{classes[labels[doubt.row]]} → {classes[doubt.other]}"
            checked.append(Tile(paths[doubt.row], "", doubt.score, change))
        bad = (Tile(paths[each.row], "", each.value, each.kind) for each in self.quality[:SHOWN])
        said = (f"{subject.capitalize()}: {'; '.join(texts)}." for subject, texts in facts)
        return Page(
            kicker="nearkin audit",
            title=f"Audit of {data}",
            lead=lead,
            sections=(
                ("Summary", (Paragraphs(tuple(said)),)),
                ("Price of leaks", cost),
                ("Distance", curve),
                ("Leaks", (Pairs(BESIDE, tuple(leaks)),)),
                ("Labels", (Tiles("Labels to check", "", tuple(checked)),)),
                ("Images", (Tiles("Images that show little, or are odd", "", tuple(bad)),)),
            ),
            tiny=images is not None and images.is_small,
        )

    @override
    def records(self) -> list[Row]:
        """The findings."""
        return self.findings

    @override
    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        audited, repaired = self.audited, self.repaired
        unreadable = audited.images.reasons if audited.images else {}
        return {
            "sizes": {"train": len(audited.train_rows), "test": len(audited.test_rows)},
            "bad": unreadable | {**audited.embeddings.bad},
            "removed": audited.embeddings.removed,
            "encoder_trained_on": audited.num_seen,
            "leaks": {
                "images": len(self.leaks.found),
                "threshold": self.leaks.threshold,
                "precision": self.leaks.precision,
                "decoys": self.leaks.decoys,
            },
            "groups": [asdict(each) for each in self.proposals],
            "price": self.price and self.price.to_dict(),
            "labels": self.labels and self.labels.to_dict(),
            "column": self.column and self.column.to_dict(),
            "left_out": self.left_out,
            "moved": self.moved,
            "repaired": {part: int((repaired == part).sum()) for part in ("train", "test")},
            "findings": self.findings,
        }

    @override
    def lines(self) -> list[str]:
        """Format what was found, subject by subject; the price stands below."""
        lines = [
            f"{subject if not number else '':8}{sentence}"
            for subject, said in self._facts()
            for number, sentence in enumerate(said)
        ]
        return lines if self.price is None else [*lines, "", *aligned([PRICE, *self.price.rows()])]

    def _facts(self) -> Iterator[tuple[str, list[str]]]:
        """What was found, by subject; first what the parts are."""
        audited, repaired = self.audited, self.repaired
        train, test = len(audited.train_rows), len(audited.test_rows)
        without = f", {removed} removed" if (removed := audited.embeddings.removed) else ""
        yield "split", [f"{train:,} training images, {test:,} test images{without}"]
        if self.price is not None and train > FITTED:
            yield "probe", [f"linear, fitted to {FITTED:,} training images, drawn at random"]
        if seen := audited.num_seen:
            of = f"{seen:,} of {count(test, 'test image')}"
            yield "encoder", [f"was trained on {of}, which flatters every accuracy; take another"]
        yield "leaks", self.leaks.sentences()
        if self.proposals:
            yield "groups", [each.line() for each in self.proposals]
        if self.labels:
            yield "labels", self.labels.sentences()
        kinds = ", ".join(f"{n:,} {k}" for k, n in Counter(x.kind for x in self.quality).items())
        if kinds:
            yield "images", [kinds]
        if self.column:
            yield "column", self.column.lines()
        for subject, why in self.left_out.items():
            yield subject, [f"not measured, {why}"]
        after = f"{(repaired == 'train').sum():,} and {(repaired == 'test').sum():,}"
        yield "repair", [f"{count(self.moved, 'image')} to change parts, which then have {after}"]


def examine(
    audited: Audited,
    ignore: str,
    ignored: Values,
    *,
    precision: float,
    seed: int,
    device: torch.device,
    on_progress: ProgressCallback,
) -> Audit:
    """Look for all that a split hides.

    `ignored` are the values of the column `ignore`, if features are to ignore one; `precision` is
    that of the leaks that features alone find. A UsageError if all test images are leaks.
    """
    embeddings = audited.embeddings
    column = None
    if ignore:
        column = column_test(ignore, *divided(embeddings, ignored), seed=seed, device=device)
    leaks = find_leaks(audited, precision, seed, on_progress)
    proposals, sources = find_sources(audited, seed, on_progress)
    joined = [pairs_of(each) for each in (embeddings.groups, sources) if each is not None]
    groups = merged(leaks.groups, np.concatenate(joined))
    on_progress(0, 2, "accuracies")
    cost, left_out = None, dict[str, str]()
    try:
        cost = price(audited, groups, leaks.cosine, seed=seed, device=device)
    except (DataError, UsageError) as error:  # leaks and the repaired split are what they are
        left_out["price"] = str(error)
    on_progress(1, 2, "labels")
    checked = check_labels(embeddings, leaks.groups, groups, seed)
    bad = find_bad(audited.images, on_progress) if audited.images is not None else []
    return Audit(
        audited, leaks, tuple(proposals), groups, cost, checked, tuple(bad), column, left_out
    )
