"""Tables of the user, and those that nearkin writes: which image a path means, in any of them."""

import csv
import os
import unicodedata
from pathlib import Path

import pytest
from builders import fill
from nearkin_command import run
from pyarrow import parquet, table

from nearkin.classification.data import open_labeled_data
from nearkin.config import ClassifyConfig
from nearkin.data.labels import class_names
from nearkin.data.opening import open_images
from nearkin.data.tables import Resolver
from nearkin.errors import DataError
from nearkin.labels.known import label_images
from nearkin.tables import read_csv, write_csv

NAMES = ("-1.png", "+2.png", "=3.png", "@4.png", "'5.png", "'=6.png", "x/7.png", "8 'a'.png")
CLASSES = ("-", "+", "=", "@")


def by_name(images):
    """The class of each image, '' for none."""
    return dict(zip(images.names, class_names(images), strict=True))


def test_what_nearkin_writes_for_spreadsheets_it_reads_as_it_was(tmp_path):
    data = fill(tmp_path / "data", *NAMES)
    expected = {name: CLASSES[row % 4] for row, name in enumerate(NAMES)}
    made = data / "made.csv"
    write_csv(made, ("path", "label"), list(expected.items()))
    cells = [row[0] for row in csv.reader(made.read_text().splitlines())]
    assert cells[1:5] == ["'-1.png", "'+2.png", "'=3.png", "'@4.png"]
    assert by_name(open_images(made, cache=False)) == expected
    assert by_name(open_images(data, labels=str(made), cache=False)) == expected
    images = open_images(data, cache=False)
    assert by_name(label_images(images, str(made))) == expected


def test_paths_and_labels_in_either_form_of_unicode(tmp_path):
    nfc, nfd = (unicodedata.normalize(form, "Käfer") for form in ("NFC", "NFD"))
    data = fill(tmp_path / "data", *(f"{nfd}{i}.png" for i in range(4)))
    rows = [(f"{nfc}{i}.png", name) for i, name in enumerate((nfc, nfd, "Wal", "Wal"))]
    for folder in (tmp_path, data):
        write_csv(folder / "t.csv", ("path", "label"), rows)
        images = open_images(data, labels=str(folder / "t.csv"), cache=False)
        assert images.classes == (nfc, "Wal")
        assert {"renamed", "merged"} <= {note.decision for note in images.notes}
    assert len(open_images(data / "t.csv", cache=False)) == 4
    images = label_images(open_images(data, cache=False), str(data / "t.csv"))
    assert class_names(images) == [nfc, nfc, "Wal", "Wal"]


def test_two_rows_of_one_image_agree_however_they_spell_it(tmp_path):
    data = fill(tmp_path / "d", "x/1.png", "x/2.png")
    spellings = ("x/1.png", "./x/1.png", "x/./1.png", "x//1.png", "x\\1.png", f"{data}/x/1.png")
    path, columns = data / "t.csv", ("path", "label")
    for spelled in spellings:
        write_csv(path, columns, [("x/1.png", "cat"), (spelled, "cat")])
        assert by_name(open_images(path, cache=False)) == {"x/1.png": "cat"}
        assert open_images(data, labels=str(path), cache=False).classes == ("cat",)
        write_csv(path, columns, [("x/1.png", "cat"), (spelled, "dog")])
        for where, labels in ((path, "auto"), (data, str(path))):
            with pytest.raises(DataError, match="line 2 and, differently, in line 3"):
                open_images(where, labels=labels)


def test_names_that_are_no_paths_are_found_as_they_are():
    """As an `ImageSource` may give them; a path of them in normal form is another text."""
    names = ("https://host/1.jpg", "./2.jpg", "a//3.jpg")
    find = Resolver(Path("to_label.csv"), names).named
    assert tuple(map(find, names)) == names
    assert find("2.jpg") is None


def test_a_header_may_be_in_capitals_in_either_format(tmp_path):
    data = fill(tmp_path, "1.png", "2.png")
    columns = {"Path": ["1.png", "2.png"], "LABEL ": ["a", "b"], "Split": ["Train", "TEST"]}
    parquet.write_table(table(columns), data / "t.parquet")
    rows = "\n".join(map(",".join, zip(*columns.values(), strict=True)))
    for text, encoding in (
        (f"{','.join(columns)}\n{rows}\n", "utf-8-sig"),
        (f"{';'.join(columns)}\r\n{rows.replace(',', ';')}\r\n", "utf-8"),
        (f"{chr(9).join(columns)}\n{rows.replace(',', chr(9))}\n", "utf-8"),
    ):
        (data / "t.csv").write_bytes(text.encode(encoding))
        for name in ("t.csv", "t.parquet"):
            images = open_images(data / name, cache=False)
            assert class_names(images) == ["a", "b"]
            assert images.splits.tolist() == ["train", "test"]
    parquet.write_table(table({"path": [b"1.png", b"2.png"]}), data / "t.parquet")
    assert open_images(data / "t.parquet").names == ("1.png", "2.png")
    (data / "t.csv").write_text("path,label,Label\n1.png,a,b\n")
    parquet.write_table(table(columns | {"label": ["b", "a"]}), data / "t.parquet")
    images = {"image": [b"", b""], "label": ["a", "b"], "Label": ["b", "a"]}
    parquet.write_table(table(images), data / "images.parquet")
    for name in ("t.csv", "t.parquet", "images.parquet"):
        with pytest.raises(DataError, match="no header of different names"):
            open_images(data / name)


def test_a_table_that_is_not_utf_8_is_told_where(tmp_path, capsys):
    data = fill(tmp_path / "d", "1.png", "2.png", os.fsdecode(b"\xff.png"))
    good = tmp_path / "names.csv"
    write_csv(good, ("path", "label"), [("1.png", "a"), (os.fsdecode(b"\xff.png"), "b")])
    assert class_names(open_images(data, labels=str(good), cache=False)) == ["a", "", "b"]
    bad = tmp_path / "bad.csv"
    head, quote = "path,label\n1.png,", "close every quote"
    for text, says in (
        (f"{head}cat\n2.png,Käfer\n", "line 3: the label is not in UTF-8; save the table"),
        (f"{head}cat\nKäfer.png,dog\n", "is not in UTF-8; save the table as UTF-8"),
        ("Größe,path\n1,1.png\n", "line 1: no header of different names; save it as UTF-8"),
        (f'{head}"big\n2.png,dog\n', f"line 2: unexpected end of data; {quote}"),
        (f'{head}"big\n2.png,"dog"\n', f"line 2: ',' expected after '\"'; {quote}"),
    ):
        bad.write_bytes(text.encode("cp1252"))
        assert run("check", data, "--labels", bad) == 3
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
    bad.write_bytes("cluster,name,kind\n0,Käfer,novel\n".encode("cp1252"))
    with pytest.raises(ValueError, match="line 2: the name is not in UTF-8"):
        list(read_csv(bad))


def test_labels_of_a_table_say_what_was_passed_over(tmp_path):
    data = fill(tmp_path / "d", *(f"{i}.png" for i in range(6)))
    known = tmp_path / "known.csv"
    rows = zip((f"{i}.png" for i in range(6)), ("0", "1", "0", "1", "-1", "-1"), strict=True)
    write_csv(known, ("path", "label"), rows)
    dataset = open_labeled_data(str(data), ClassifyConfig(labeled=str(known)))
    assert sorted(dataset.classes) == ["0", "1"]
    assert [(n.decision, n.count) for n in dataset.images.notes] == [("left out", 2)]
