"""CSV tables as spreadsheets write them, and safe to open in one."""

import csv

from nearkin.tables import read_csv, write_csv


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


def test_tables_of_spreadsheets_are_read_and_semicolons_of_others_stay(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("\ufeffpath;label\na.png;cat, black\n", encoding="utf-8")
    assert list(read_csv(path)) == [{"path": "a.png", "label": "cat, black"}]
    path.write_text("path\na;b.png\n", encoding="utf-8")
    assert list(read_csv(path)) == [{"path": "a;b.png"}]
