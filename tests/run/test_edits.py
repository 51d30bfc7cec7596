"""Naming, merging and splitting the classes of a discovery, on real files."""

import os
import threading
from codecs import BOM_UTF8

import pytest
from builders import contents, write_files
from discoveries import write_rows

from nearkin.classifier.assignments import COLUMNS
from nearkin.discovery.clusters import CLUSTER_COLUMNS, LABEL_COLUMNS
from nearkin.discovery.rounds import accepted_classes
from nearkin.errors import CheckpointError, DataError, OutputError, UsageError
from nearkin.run.edits import (
    class_names,
    classes,
    image_labels,
    label_images,
    name_classes,
    split_off,
)
from nearkin.run.folder import RunFolder, clear
from nearkin.tables import read_csv, write_csv

FLAGS = dict.fromkeys(["a", "b", "d", "=f", "g\udcff"], "core") | {"c": "border", "e": ""}
IN = {
    "a": "new-1", "b": "new-1", "c": "new-1", "d": "new-2", "e": "new-2", "=f": "new-3",
    "g\udcff": "cats",
}  # fmt: skip
NAMES = ["0 came with a class", *IN]
EDITS = {name_classes: ["new-1"], split_off: {"c"}}


@pytest.fixture
def folder(tmp_path):
    """What a discovery leaves, as far as its classes go."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    rows = [[path, cluster, 0.5, *[""] * 6, FLAGS[path]] for path, cluster in IN.items()]
    write_csv(folder.assignments, COLUMNS, rows)
    sizes = {"cats": 1, "new-1": 3, "new-2": 2, "new-3": 1, "new-5": 0}
    kinds = {name: "known" if name == "cats" else "novel" for name in sizes}
    rows = [[name, "", kinds[name], sizes[name], *[""] * 6] for name in sizes]
    write_csv(folder.clusters, CLUSTER_COLUMNS, rows)
    return folder


def column(path, name):
    return [row[name] for row in read_csv(path)]


def state(folder):
    return {path.name: path.read_bytes() for path in folder.path.glob("*.csv")}


def test_a_named_class_is_what_a_second_round_accepts(folder):
    name_classes(folder, ["new-1"], "  violins ")
    assert accepted_classes(folder.path) == {"a": "violins", "b": "violins"}
    name_classes(folder, ["new-1"], "")
    assert accepted_classes(folder.path) == {}
    name_classes(folder, ["new-1"], "cats")  # a novel class may be a known one
    assert accepted_classes(folder.path) == dict.fromkeys(["a", "b"], "cats")


def test_merged_classes_are_one_to_a_second_round(folder):
    name_classes(folder, ["new-1", "new-3"], "=violins")
    assert accepted_classes(folder.path) == dict.fromkeys(["a", "b", "=f"], "=violins")
    assert column(folder.clusters, "name") == ["", "=violins", "", "=violins", ""]
    assert class_names(folder) == IN | dict.fromkeys(["a", "b", "c", "=f"], "=violins")


def test_names_that_collide_are_refused_and_change_nothing(folder):
    before = state(folder)
    for edit, chosen, name, says in (
        (name_classes, ["cats"], "violins", "the known class 'cats' is named 'violins'"),
        (name_classes, ["new-1"], "new-2", "'new-1' is named 'new-2', which is another class"),
        (split_off, {"a"}, "new-2", "is named 'new-2', which is another class"),
    ):
        with pytest.raises(DataError, match=says):
            edit(folder, chosen, name)
    assert state(folder) == before


def test_a_class_that_is_split_off_has_the_name_of_no_other(folder):
    """Of no known class without an image either, and of none that a person has named."""
    folder.write_summary({"known": ["cats", "new-4"]})
    name_classes(folder, ["new-1"], "new-6")
    label_images(folder, {"d"}, "new-7")
    assert split_off(folder, {"c"}, "") == "new-8"


def test_single_images_are_labeled_for_the_next_round(folder):
    rows = [["a", "", "new-1", 0.5, 0.1], ["=f", "", "new-3", 0.5, 0.2]]
    write_csv(folder.to_label, LABEL_COLUMNS, rows)
    name_classes(folder, ["new-2"], "violins")
    label_images(folder, {"a", "g\udcff"}, " cellos ")
    label_images(folder, {"=f"}, "new-2")
    expected = {"a": "cellos", "g\udcff": "cellos", "=f": "violins"}
    assert image_labels(folder, IN) == expected
    assert column(folder.to_label, "cluster") == ["new-1", "new-3", "cats"]
    label_images(folder, {"a"}, "")
    assert image_labels(folder, IN).keys() == {"g\udcff", "=f"}
    assert column(folder.original_to_label, "label") == ["", ""]
    before = state(folder)
    with pytest.raises(UsageError, match="'0 came with a class' came with a label"):
        label_images(folder, {"a", "0 came with a class"}, "cellos")
    assert state(folder) == before


def test_images_of_a_run_without_classes_are_labeled_too(tmp_path):
    run = RunFolder(tmp_path)
    label_images(run, {"b", "a"}, "cellos")
    label_images(run, {"a"}, "")
    assert [*read_csv(run.original_to_label)] == []  # which undoes both
    assert [*read_csv(run.to_label)] == [
        {"path": "a", "label": ""},
        {"path": "b", "label": "cellos"},
    ]
    assert classes(run, ["a", "b"])["labels"] == {"1": "cellos"}
    with pytest.raises(UsageError, match="no images are selected"):
        label_images(run, set(), "cellos")


def test_labels_of_single_images_that_say_nothing_are_refused(folder):
    write_csv(folder.to_label, LABEL_COLUMNS[:2], [["a", "new-1"]])
    with pytest.raises(DataError, match="'a' is labeled 'new-1', a class without a name"):
        image_labels(folder, IN)
    write_csv(folder.to_label, LABEL_COLUMNS[:2], [["a", "x"], ["a", ""], ["a", "y"]])
    with pytest.raises(DataError, match="'a' is labeled 'x' and, in another row, 'y'"):
        image_labels(folder, IN)


def test_split_images_are_a_class_and_sure_to_be_of_it(folder):
    assert split_off(folder, {"c", "e", "g\udcff"}, "violas") == "new-4"
    assert accepted_classes(folder.path) == dict.fromkeys(["c", "e", "g\udcff"], "violas")
    found = ["cats", "new-1", "new-2", "new-3", "new-5"]
    assert column(folder.clusters, "cluster") == [*found, "new-4"]
    assert column(folder.clusters, "size") == ["0", "2", "1", "1", "0", "3"]
    assert column(folder.clusters, "kind")[-1] == "novel"
    assert column(folder.assignments, "score") == ["0.5"] * 7
    assert split_off(folder, {"e"}, "") == "new-6"
    assert class_names(folder)["e"] == "new-6"


def test_the_page_is_told_what_there_is(folder):
    before = classes(folder, NAMES)
    assert before["editable"] is True
    assert before["cluster_of"] == {str(NAMES.index(name)): IN[name] for name in IN}
    assert before["classes"][:2] == [
        {"cluster": "cats", "name": "", "kind": "known", "size": 1},
        {"cluster": "new-1", "name": "", "kind": "novel", "size": 3},
    ]
    split_off(folder, {"c", "=f"}, "violas")
    name_classes(folder, ["new-2"], "<b>")
    after = classes(folder, NAMES)
    assert after["cluster_of"] == {**before["cluster_of"], "3": "new-4", "6": "new-4"}
    made = {"cluster": "new-4", "name": "violas", "kind": "novel", "size": 2}
    assert after["classes"][-1] == made
    assert after["classes"][2]["name"] == "<b>"


def test_what_was_found_is_kept_to_the_byte_and_only_once(folder):
    before = state(folder)
    name_classes(folder, ["new-1"], "violins")
    assert state(folder)["original-clusters.csv"] == before["clusters.csv"]
    assert state(folder)["assignments.csv"] == before["assignments.csv"]
    split_off(folder, {"c"}, "violas")
    name_classes(folder, ["new-2"], "cellos")
    now = state(folder)
    assert now["original-clusters.csv"] == before["clusters.csv"]
    assert now["original-assignments.csv"] == before["assignments.csv"]
    tables = {"clusters.csv", "assignments.csv"}
    assert set(now) == tables | {f"original-{name}" for name in tables}
    clear(folder)
    assert state(folder) == {}


def test_files_of_an_earlier_page_are_removed_and_others_beside_them_stay(folder):
    made = dict.fromkeys(["0.js", "12.js", "0.webp"], b"made")
    mine = dict.fromkeys(["viewer.js", "logo.webp", "0.txt", "deep/0.js"], b"mine")
    write_files(folder.report_files, made | mine)
    clear(folder)
    assert contents(folder.report_files) == mine


def test_a_name_is_one_however_its_accents_are_written(folder):
    """Spreadsheets and file systems take letters and their accents apart."""
    rows = [*read_csv(folder.clusters)]
    rows[1] = rows[1] | {"name": "cafe\u0301"}
    rows[3] = rows[3] | {"name": "caf\u00e9"}
    write_rows(folder.clusters, rows)
    assert set(accepted_classes(folder.path).values()) == {"caf\u00e9"}


def test_numbers_are_the_classes_that_tables_of_labels_mean_by_them(folder):
    """Programs make floats of them where a cell is empty; among names, they are names."""
    rows = [*read_csv(folder.clusters)]
    named = zip(rows, ("3", "new-1", "new-2", "new-3", "new-5"), ("", "3.0", "7.0", "-1", ""))
    write_rows(folder.clusters, [row | {"cluster": c, "name": n} for row, c, n in named])
    paths = {"./a": "7.0", "a": "new-2", "b": "3.0", "c": "-1", "d": "7"}
    write_csv(folder.to_label, LABEL_COLUMNS[:2], paths.items())
    assert image_labels(folder, IN) == {"a": "7", "b": "3", "d": "7"}
    assert set(accepted_classes(folder.path).values()) == {"3", "7"}
    folder.write_summary({"known": ["cats"]})
    assert image_labels(folder, IN) == {"a": "7.0", "b": "3.0", "c": "-1", "d": "7"}
    write_csv(folder.to_label, LABEL_COLUMNS[:2], [["a", "x"], ["./a", "y"]])
    with pytest.raises(DataError, match="'a' is labeled 'x' and, in another row, 'y'"):
        image_labels(folder, IN)


def test_columns_of_the_user_stay(folder):
    """Whoever has named classes in a spreadsheet may have noted more there, and changed its ends."""
    rows = [{**row, "note": "a, b"} for row in read_csv(folder.clusters)]
    write_rows(folder.clusters, rows)  # whose lines end on CR and LF
    folder.clusters.write_bytes(BOM_UTF8 + folder.clusters.read_bytes())
    split_off(folder, {"c"}, "violas")
    assert folder.clusters.read_bytes().startswith(BOM_UTF8)
    assert not folder.assignments.read_bytes().startswith(BOM_UTF8)
    assert column(folder.clusters, "note") == ["a, b"] * 5 + [""]


def test_a_name_is_one_plain_line_and_comes_back_as_it_was(folder):
    before = state(folder)
    for name in ("x" * 101, "two\nlines", "\x1b[31m", "\u202egnp", "\ud800", "a\0", "cat\u200d"):
        for edit, chosen in EDITS.items():
            with pytest.raises(UsageError, match="one line of at most 100"):
                edit(folder, chosen, name)
    assert state(folder) == before
    for name in (
        "x" * 100,
        "'=1+1",
        "@me",
        "می\u200cشود",
        "全角\u3000空白",
        'Geige, "rot"; 小提琴',
        "</script>",
    ):
        name_classes(folder, ["new-1"], name)
        assert set(accepted_classes(folder.path).values()) == {name}


def test_what_is_not_there_is_refused(folder, tmp_path):
    before = state(folder)
    for edit, chosen, says in (
        (name_classes, ["new-1", "new-9"], "no class 'new-9'"),
        (split_off, {"a", NAMES[0]}, "'0 came with a class' came with a label"),
        (split_off, set(), "no images are selected"),
    ):
        with pytest.raises(UsageError, match=says):
            edit(folder, chosen, "violins")
    assert state(folder) == before
    other = RunFolder(tmp_path)
    for edit in EDITS:
        with pytest.raises(UsageError, match="no finished discovery"):
            edit(other, ["a"], "violins")
    gone = RunFolder(tmp_path / "gone")
    with pytest.raises(OutputError, match="is gone"):
        label_images(gone, {"a"}, "cellos")
    nothing = {"editable": False, "classes": [], "cluster_of": {}, "labels": {}}
    assert classes(other, NAMES) == nothing
    assert list(tmp_path.iterdir()) == [folder.path]


def test_damaged_tables_are_refused_and_left(folder):
    for damage in ("path,cluster\n", "cluster\nnew-1,,,,\n", "path,cluster,flag\n,,,,"):
        folder.assignments.write_text(f"{damage}x\n")
        before = state(folder)
        with pytest.raises(CheckpointError, match=r"assignments.csv cannot be .*discover again"):
            split_off(folder, {"x"}, "violas")
        assert state(folder) == before


def test_nothing_is_changed_while_somebody_else_writes_or_where_nobody_can(folder):
    before = state(folder)
    with folder.locked():
        for edit, chosen in EDITS.items():
            with pytest.raises(OutputError, match="in use by"):
                edit(folder, chosen, "violins")
    assert state(folder) == before
    name_classes(folder, ["new-1"], "violins")
    folder.lock.unlink(missing_ok=True)
    folder.lock.mkdir()  # which not even root can open as a file
    with pytest.raises(OutputError, match="cannot write"):
        name_classes(folder, ["new-1"], "violins")


def test_a_full_disk_leaves_what_there_was(folder, monkeypatch):
    before = state(folder)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        split_off(folder, {"c"}, "violas")
    assert {name: held for name, held in state(folder).items() if "partial" not in name} == before


def full(_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("synced", range(6))
def test_no_image_is_without_a_class_whenever_it_ends(folder, monkeypatch, synced):
    """Each file is synced before it gets its name, and that may be the last thing that is done."""
    sync, left = os.fsync, [None] * synced
    monkeypatch.setattr(
        os, "fsync", lambda file: sync(file) if left and not left.pop() else full(file)
    )
    with pytest.raises(OutputError, match="No space left"):
        split_off(folder, {"c", "d"}, "violas")
    monkeypatch.undo()
    known = set(column(folder.clusters, "cluster"))
    assert set(column(folder.assignments, "cluster")) <= known
    assert split_off(folder, {"c", "d"}, "violas") == ("new-6" if "new-4" in known else "new-4")
    assert accepted_classes(folder.path) == {"c": "violas", "d": "violas"}
    assert column(folder.original_assignments, "cluster") == list(IN.values())


def test_readers_see_a_table_whole(folder):
    """While it is written over again and again."""
    stop, counts = threading.Event(), []

    def read():
        while not stop.is_set():
            counts.append(len(column(folder.clusters, "cluster")))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(20):
            name_classes(folder, ["new-1"], f"name {number}")
    finally:
        stop.set()
        reader.join()
    assert set(counts) == {5}
