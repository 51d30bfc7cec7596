"""CSV tables as spreadsheets write them, and safe to open in one."""

import csv

import pytest

from nearkin.tables import read_csv, write_csv


def test_names_of_files_are_cells_not_formulas(tmp_path):
    path = tmp_path / "bad_files.csv"
    names = ["=cmd|' /C calc'!A0", "@x", "-1", 'two\nlines, "quoted"', "plain.jpg", "'-1", "'a'"]
    names += ["a\rb.png"]
    write_csv(path, ("path", "bytes"), [(name, -5) for name in names])
    with path.open(newline="", encoding="utf-8") as file:
        cells = [row["path"] for row in csv.DictReader(file)]
    guarded = [True, True, True, False, False, True, False, False]
    assert cells == [f"'{name}" if mark else name for name, mark in zip(names, guarded)]
    assert [row["path"] for row in read_csv(path)] == names
    assert all(row["bytes"] == "-5" for row in read_csv(path))


def test_tables_to_edit_are_marked_as_utf_8_and_others_plain(tmp_path):
    for to_edit in (True, False):
        write_csv(tmp_path / "table.csv", ("name",), [["Häuser"]], to_edit=to_edit)
        content = (tmp_path / "table.csv").read_bytes()
        assert content.startswith(b"\xef\xbb\xbfname" if to_edit else b"name")
        assert list(read_csv(tmp_path / "table.csv")) == [{"name": "Häuser"}]


def test_tables_of_spreadsheets_are_read_and_semicolons_of_others_stay(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("\ufeffpath;label\na.png;cat, black\n", encoding="utf-8")
    assert list(read_csv(path)) == [{"path": "a.png", "label": "cat, black"}]
    path.write_text("path\na;b.png\n", encoding="utf-8")
    assert list(read_csv(path)) == [{"path": "a;b.png"}]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "line 1: no header of different names"),
        (b" \n1\n", "line 1: no header of different names"),
        (b"path,label,label\n", "line 1: no header of different names"),
        (b"path,l\xe4bel\n", "line 1: no header of different names; save it as UTF-8"),
        (b'path,label\na,b\nc,"d\n\n', "line 3: .*; close every quote"),
        (b'path\n"a" b\n', "line 2: .*; close every quote"),
        (b"path,label\na,b\nc,d,e\n", "line 3: 3 cells for 2 columns; put quotes"),
        (b"path,label\na,\x80\n", "line 2: the label is not in UTF-8"),
        (b"path,group\na,\xff\n", "line 2: the group is not in UTF-8"),
    ],
)
def test_what_is_no_table_is_refused_with_its_line(tmp_path, content, says):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ValueError, match=says):
        list(read_csv(tmp_path / "t.csv"))


def test_what_people_leave_open_is_read(tmp_path):
    (tmp_path / "t.csv").write_bytes(
        "Path, LABEL ,x,x\n\n\xe4\udcff,b\n".encode("utf-8", "surrogateescape")
    )
    assert list(read_csv(tmp_path / "t.csv")) == [{"path": "\xe4\udcff", "label": "b", "x": ""}]
