"""The metrics of a training: cut back to a step, and the same bytes for the same rows."""

import os

import pytest

from nearkin.errors import CheckpointError, ResourceError
from nearkin.run.csv_logger import CSVLogger

COLUMNS = ("step", "loss", "knn")


def rows(upto):
    return [
        {"step": n, "loss": 1 / n, **({"knn": 0.5} if n % 3 == 0 else {})} for n in range(1, upto)
    ]


def fill(path, entries, upto=0):
    with CSVLogger(path, COLUMNS, upto=upto) as journal:
        for row in entries:
            journal.append(row)


def test_a_journal_gives_back_what_was_written(tmp_path):
    path = tmp_path / "metrics.csv"
    fill(path, rows(8))
    with CSVLogger(path, COLUMNS, upto=7) as journal:
        assert journal.rows() == [{name: float(x) for name, x in row.items()} for row in rows(8)]


def test_a_journal_cut_back_and_continued_has_the_bytes_of_an_unbroken_one(tmp_path):
    whole, broken = tmp_path / "whole.csv", tmp_path / "broken.csv"
    fill(whole, rows(10))
    fill(broken, rows(8))
    with broken.open("a") as file:
        file.write("8,0.12")  # killed in the middle of a row
    fill(broken, rows(10)[5:], upto=5)
    assert broken.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "row", [b"1,2", b"one,.5,", b"1,half,", b"\xff\xfe,,", b",,"],
    ids=["other columns", "no step", "no number", "no text", "empty"],
)  # fmt: skip
def test_a_journal_that_holds_anything_else_is_named(tmp_path, row):
    path = tmp_path / "metrics.csv"
    fill(path, rows(3))
    path.write_bytes(path.read_bytes() + row + b"\n")
    with pytest.raises(CheckpointError, match=r"metrics.csv cannot be used .*put back a copy or"):
        CSVLogger(path, COLUMNS, upto=5)


def test_a_journal_of_as_many_other_columns_is_refused_and_stays(tmp_path):
    path = tmp_path / "metrics.csv"
    fill(path, rows(3))
    path.write_text(path.read_text().replace("knn", "rank"))
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="its columns are step,loss,rank"):
        CSVLogger(path, COLUMNS, upto=5)
    assert path.read_bytes() == before


def test_rows_that_could_not_be_synced_are_written_once(tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole.csv", tmp_path / "broken.csv"
    fill(whole, rows(8))

    def fail(_):
        raise OSError(28, "No space left on device")

    with CSVLogger(broken, COLUMNS, upto=0) as journal:
        for row in rows(8):
            journal.append(row)
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(ResourceError, match="make room"):
            journal.flush()
        monkeypatch.undo()
        journal.flush()
    assert broken.read_bytes() == whole.read_bytes()
