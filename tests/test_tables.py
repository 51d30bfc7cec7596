"""Tables as files: cut back to a step, safe to open, the same bytes for the same rows."""

import csv
import os

import pytest

from nearkin import tables
from nearkin.errors import CheckpointError, OutputError, ResourceError
from nearkin.tables import Journal, read_csv, read_sealed, usable, write_csv, write_sealed, writing

COLUMNS = ("step", "loss", "knn")


def rows(upto):
    return [
        {"step": n, "loss": 1 / n, **({"knn": 0.5} if n % 3 == 0 else {})} for n in range(1, upto)
    ]


def fill(path, entries, upto=0):
    with Journal(path, COLUMNS, upto=upto) as journal:
        for row in entries:
            journal.append(row)


def test_a_journal_gives_back_what_was_written(tmp_path):
    path = tmp_path / "metrics.csv"
    fill(path, rows(8))
    with Journal(path, COLUMNS, upto=7) as journal:
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
        Journal(path, COLUMNS, upto=5)


def test_names_of_files_are_cells_not_formulas(tmp_path):
    path = tmp_path / "bad_files.csv"
    names = ["=cmd|' /C calc'!A0", "@x", "-1", 'two\nlines, "quoted"', "plain.jpg", "'-1", "'a'"]
    write_csv(path, ("path", "bytes"), [(name, -5) for name in names])
    with path.open(newline="", encoding="utf-8") as file:
        cells = [row["path"] for row in csv.DictReader(file)]
    guarded = [True, True, True, False, False, True, False]
    assert cells == [f"'{name}" if mark else name for name, mark in zip(names, guarded)]
    assert [row["path"] for row in read_csv(path)] == names
    assert all(row["bytes"] == "-5" for row in read_csv(path))


def test_rows_that_could_not_be_synced_are_written_once(tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole.csv", tmp_path / "broken.csv"
    fill(whole, rows(8))

    def fail(_):
        raise OSError(28, "No space left on device")

    with Journal(broken, COLUMNS, upto=0) as journal:
        for row in rows(8):
            journal.append(row)
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(ResourceError, match="make room"):
            journal.flush()
        monkeypatch.undo()
        journal.flush()
    assert broken.read_bytes() == whole.read_bytes()


def test_a_sealed_file_is_given_back_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    write_sealed(path, b"content")
    assert read_sealed(path) == b"content"
    sealed = path.read_bytes()
    for place in range(len(sealed)):
        path.write_bytes(sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :])
        assert read_sealed(path) is None
        path.write_bytes(sealed[:place])
        assert read_sealed(path) is None
    assert read_sealed(tmp_path / "absent") is None


def test_what_is_more_than_is_shown_is_counted():
    assert tables.abridged(["a", "b"], 3) == tables.abridged(["a", "b"], 2) == ["a", "b"]
    assert tables.abridged(["a", "b", "c"], 2) == ["a", "b", "and 1 more"]


def test_tables_of_spreadsheets_are_read_and_semicolons_of_others_stay(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("\ufeffpath;label\na.png;cat, black\n", encoding="utf-8")
    assert list(read_csv(path)) == [{"path": "a.png", "label": "cat, black"}]
    path.write_text("path\na;b.png\n", encoding="utf-8")
    assert list(read_csv(path)) == [{"path": "a;b.png"}]


def test_letters_of_all_alphabets_and_line_ends_are_printed_as_they_are():
    assert tables.printable("é\nж") == "é\nж"
    assert tables.printable("\u202eé\udcff") == "\\u202eé\\udcff"


def test_an_error_becomes_a_line_with_its_reason(tmp_path):
    for error, reason in ((ValueError("two\n  lines"), "two lines"), (KeyError(), "KeyError")):
        says = rf"file cannot be used \({reason}\); mend it"
        with pytest.raises(CheckpointError, match=says), usable(tmp_path / "file", "mend it"):
            raise error
    says = "cannot write .*file: No space left; choose another -o"
    with pytest.raises(OutputError, match=says), writing(tmp_path / "file"):
        raise OSError(28, "No space left")
