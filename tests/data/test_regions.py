"""Boxes of images as images: of a table, of a COCO file, to the features of `embed`."""

import csv
import json
import pickle
import shutil

import numpy as np
import pyarrow as pa
import pytest
from builders import fill, write_files
from nearkin_command import run
from PIL import Image
from pyarrow import parquet

import nearkin
from nearkin.config import TrainConfig
from nearkin.data.opening import column_of, open_images
from nearkin.data.union import union
from nearkin.errors import DataError
from nearkin.run.data import note_labels, open_split
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv

HEADER = ("path", "x0", "y0", "x1", "y1", "label")
BOXES = ((0, 0, 21, 15), (31, 10, 51, 40), (60.2, 40, 75.5, 60))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Four images of 80 by 60 pixels, of which the last lies on its side."""
    folder = tmp_path_factory.mktemp("boxes")
    (folder / "images").mkdir()
    rng, exif = np.random.default_rng(0), Image.Exif()
    for number in range(4):
        pixels = rng.integers(0, 256, (60, 80, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
    exif[274] = 6  # a quarter turn clockwise
    Image.fromarray(pixels).save(folder / "images" / "3.png", exif=exif)
    return folder


def table(file, rows, header=HEADER):
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])
    return file


def upright(file):
    pixels = np.asarray(Image.open(file))
    return np.rot90(pixels, -1) if file.name == "3.png" else pixels


def test_a_row_per_box_reads_its_pixels_of_the_upright_image(photos):
    rows = [(f"images/{n}.png", *box, "ab"[n % 2]) for n in range(4) for box in BOXES[:2]]
    images = open_images(str(table(photos / "rows.csv", rows)))
    assert images.names[:2] == ("images/0.png#0,0,21,15", "images/0.png#31,10,51,40")
    assert images.classes == ("a", "b")
    assert images.labels.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert not images.bad
    assert not images.notes
    for some in (images, pickle.loads(pickle.dumps(images)), images.subset(np.array([1, 6, 7]))):
        for row, name in enumerate(some.names):
            file, _, box = name.partition("#")
            left, top, right, bottom = map(int, box.split(","))
            expected = upright(photos / file)[top:bottom, left:right]
            np.testing.assert_array_equal(some.read(row), expected, err_msg=name)
            assert some.sizes[row].tolist() == [right - left, bottom - top]


def test_a_region_is_found_in_its_image_also_among_whole_images(photos):
    rows = [(f"images/{n}.png", *BOXES[1], "a") for n in range(4)]
    boxes = open_images(str(table(photos / "found.csv", rows)))
    both = union(open_images(str(photos / "images")), boxes, "boxes/")
    for row, name in enumerate(both.names):
        found = both.source.region(row)
        assert (found is None) == ("#" not in name), name
        if found:
            file = photos / name.removeprefix("boxes/").partition("#")[0]
            assert found.source.read(found.row) == file.read_bytes()
            width, height = upright(file).shape[1::-1]
            sides = found.corners * (width, height, width, height)
            np.testing.assert_allclose(sides, BOXES[1])


def test_boxes_of_one_image_are_one_group_unless_the_table_says_another(photos):
    rows = [(f"images/{n}.png", *box, "a") for n in range(3) for box in BOXES]
    images = open_images(str(table(photos / "groups.csv", rows)))
    assert images.groups.tolist() == [0, 0, 0, 3, 3, 3, 6, 6, 6]
    # Images of one name in two folders are two images.
    assert set(images.group_names) == {str(photos / f"images/{n}.png") for n in range(3)}
    written = pa.table(
        {
            "path": ["images/0.png", "images/1.png", "images/2.png"],
            **dict(zip(("x0", "y0", "x1", "y1"), ([float(x)] * 3 for x in BOXES[0]))),
            "group": ["one", "one", None],
        }
    )
    parquet.write_table(written, photos / "groups.parquet")
    assert open_images(str(photos / "groups.parquet")).groups.tolist() == [0, 0, 2]


def test_the_groups_of_boxes_are_the_same_where_the_data_have_moved(photos, tmp_path):
    rows = [(f"images/{n}.png", *box, "a") for n in range(3) for box in BOXES]
    table(photos / "moved.csv", rows)
    moved, folder = shutil.copytree(photos, tmp_path / "moved"), RunFolder(tmp_path / "run")
    folder.path.mkdir()
    for place in (photos, moved):
        note_labels(folder, open_split(str(place / "moved.csv"), TrainConfig(val=0.5)))


def test_a_box_ends_at_the_edge_and_one_without_pixels_is_bad(photos):
    rows = [
        ("images/0.png", -5, 50, 30, 90, "a"),
        ("images/0.png", 80, 0, 90, 10, "a"),
        ("images/0.png", 79, 0, 90, 10, "a"),
        ("images/1.png", "", "", "", "", "a"),
        ("images/1.png", *BOXES[2], "a"),
        ("images/1.png", *BOXES[2], "a"),
        ("broken.png", *BOXES[0], "b"),
    ]
    (photos / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    images = open_images(str(table(photos / "edges.csv", rows)))
    assert images.names == ("images/0.png#-5,50,30,90", "images/1.png#60,40,76,60")
    assert images.sizes.tolist() == [[30, 10], [16, 20]]
    assert images.reasons == {
        "images/0.png#80,0,90,10": "box outside of the image",
        "images/0.png#79,0,90,10": "box of less than 2 pixels",
        "broken.png#0,0,21,15": "not-an-image",
    }
    assert [note.decision for note in images.notes] == ["left out", "merged"]


WRONG = {
    "box '1', '2', '3', ''; give numbers x0, y0, x1 and y1": [("images/0.png", 1, 2, 3, "", "a")],
    "box '1', '2', '3', 'x'; give": [("images/0.png", 1, 2, 3, "x", "a")],
    "line 3: box 5, 5, 5, 9 holds no pixel": [
        ("images/0.png", *BOXES[0], "a"),
        ("images/0.png", 5, 5, 5, 9, "a"),
    ],
    "holds no pixel": [("images/0.png", 1, 2, "inf", 3, "a")],
    "described in line 2 and, differently, in line 3": [
        ("images/0.png", *BOXES[0], "a"),
        ("images/0.png", *BOXES[0], "b"),
    ],
    "1 of 1 files do not exist": [("images/9.png", *BOXES[0], "a")],
    "none of 1 images can be used": [("images/0.png", 90, 90, 99, 99, "a")],
}


@pytest.mark.parametrize("said", WRONG)
def test_a_table_of_boxes_that_cannot_be_is_refused_in_one_line(photos, said, refusal):
    assert said in refusal(3, "check", table(photos / "wrong.csv", WRONG[said]))


def coco(boxes):
    return {
        "images": [
            {"id": n, "file_name": f"{n}.png", "width": 80, "height": 60} for n in range(4)
        ],
        "categories": [{"id": 1, "name": "ant"}, {"id": 2, "name": "bee, small"}],
        "annotations": [
            {"id": n, "image_id": image, "category_id": category, "bbox": box}
            for n, (image, category, box) in enumerate(boxes)
        ],
    }


def test_a_coco_file_lies_beside_its_images_or_in_a_folder_beside_them(photos, tmp_path):
    boxes = [(0, 1, [1, 2, 20, 30]), (2, 2, [0, 0, 10.5, 10]), (2, 1, [30, 30, 20, 20])]
    for place in ("annotations/c.json", "c.json", "images/_annotations.coco.json"):
        (photos / place).parent.mkdir(exist_ok=True)
        (photos / place).write_text(json.dumps(coco(boxes)))
        images = open_images(str(photos / place))
        assert [name.rpartition("/")[2] for name in images.names] == [
            "0.png#1,2,21,32",
            "2.png#0,0,11,10",
            "2.png#30,30,50,50",
        ]
        assert images.classes == ("ant", "bee, small")
        assert images.labels.tolist() == [0, 1, 0]
        first = upright(photos / "images" / "0.png")[2:32, 1:21]
        np.testing.assert_array_equal(images.read(0), first)
        (photos / place).unlink()


def test_crowds_are_left_out_and_a_box_of_two_classes_has_none(photos):
    boxes = [(0, 1, [1, 2, 20, 30]), (0, 2, [1, 2, 20, 30]), (1, 2, [1, 2, 20, 30])]
    written = coco(boxes)
    written["annotations"] += [
        {**written["annotations"][0], "iscrowd": 1},
        {"image_id": 3, "category_id": 1},
    ]
    (photos / "c.json").write_text(json.dumps(written))
    images = open_images(str(photos / "c.json"))
    assert images.labels.tolist() == [-1, 0]
    assert images.classes == ("bee, small",)
    texts = [str(note) for note in images.notes]
    assert any("2 annotations" in text and "crowd" in text for text in texts)
    assert any("labels that are not one class" in text for text in texts)


def test_boxes_without_pixels_are_left_out_and_those_of_one_box_and_class_are_merged(photos):
    """Two of COCO's own train2017 have no height."""
    boxes = [(0, 1, [1, 2, 20, 30])] * 2 + [(1, 2, [5, 5, *size]) for size in ((0, 9), (9, 0))]
    (photos / "c.json").write_text(json.dumps(coco([*boxes, (1, 2, [5, 5, 9, 9])])))
    images = open_images(str(photos / "c.json"))
    assert images.labels.tolist() == [0, 1]
    left, merged = images.notes
    assert (left.decision, left.count) == ("left out", 2)
    assert left.text.endswith("c.json of a crowd, or without pixels")
    assert (merged.decision, merged.count) == ("merged", 1)
    assert merged.text.endswith("c.json with the boxes of others")


@pytest.fixture
def parts(tmp_path):
    """Two parts whose images have the same names, as COCO's and those of many exports."""
    for row, part in enumerate(("train2017", "val2017")):
        fill(tmp_path / part, "0.png", "2.png", seed=10 * row)
    return tmp_path


NAMED = coco([(0, 1, [1, 2, 9, 5]), (2, 2, [0, 0, 8, 8])])


@pytest.mark.parametrize(
    "file",
    [
        *("annotations/instances_val2017.json", "annotations/val.json", "validation.json"),
        *("val2017/_annotations.coco.json", "val2017/c.json"),
    ],
)
def test_a_coco_file_is_of_the_part_that_its_name_or_its_folder_says(parts, file):
    write_files(parts, {file: json.dumps(NAMED).encode()})
    images = open_images(str(parts / file))
    expected = upright(parts / "val2017" / "0.png")[2:7, 1:10]
    np.testing.assert_array_equal(images.read(0), expected)


def test_a_coco_file_that_may_be_of_either_part_is_refused(parts, refusal):
    write_files(parts, {"annotations/all.json": json.dumps(NAMED).encode()})
    said = refusal(3, "check", parts / "annotations" / "all.json")
    assert f"'0.png' is in {parts}/train2017 and in {parts}/val2017; write the folder" in said
    for folder in ("val2017", f"{parts}/val2017"):  # as it is written in the file
        listed = [{**each, "file_name": f"{folder}/{each['id']}.png"} for each in NAMED["images"]]
        written = json.dumps({**NAMED, "images": listed}).encode()
        write_files(parts, {"annotations/all.json": written})
        images = open_images(str(parts / "annotations" / "all.json"))
        expected = upright(parts / "val2017" / "0.png")[2:7, 1:10]
        np.testing.assert_array_equal(images.read(0), expected)


def test_a_file_that_is_spelt_in_two_ways_is_one(photos):
    listed = coco([(0, 1, [1, 2, 20, 30]), (1, 2, [1, 2, 20, 30]), (2, 1, [1, 2, 20, 30])])
    listed["images"][1]["file_name"] = "./0.png"
    (photos / "images" / "c.json").write_text(json.dumps(listed))
    images = open_images(str(photos / "images" / "c.json"))
    assert images.labels.tolist() == [-1, 0]
    assert "1 labels that are not one class, such as 'two classes'" in str(images.notes[0])


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"images": []}, "is no COCO file"),
        ("no json", "is no COCO file"),
        (coco([]), "no annotation has a box"),
        (coco([(7, 1, [0, 0, 9, 9])]), "an annotation names 7, which is not listed"),
        (coco([(0, 1, [5, 5, 0, 9])]), "no annotation has a box"),
        ({**coco([(0, 1, [0, 0, 9, 9])]), "images": [{"id": 0, "file_name": "gone.jpg"}]}, "1 of 1 files do not exist"),
        ({**coco([(0, 1, [0, 0, 9, 9])]), "images": [{"id": 0, "file_name": 300 * "x" + ".jpg"}]}, "1 of 1 files do not exist"),
    ],
)  # fmt: skip
def test_a_coco_file_that_cannot_be_used_is_refused_in_one_line(photos, written, said, refusal):
    (photos / "wrong.json").write_text(
        written if isinstance(written, str) else json.dumps(written)
    )
    assert said in refusal(3, "check", photos / "wrong.json")


def test_features_of_a_box_are_those_of_the_image_cut_out_by_hand(photos, trained_run, tmp_path):
    rows = [(f"images/{n}.png", *BOXES[n % 2], "ab"[n % 2]) for n in range(4)]
    boxed = table(photos / "embedded.csv", rows)
    for path, left, top, right, bottom, label in rows:
        (tmp_path / "cut" / label).mkdir(parents=True, exist_ok=True)
        pixels = upright(photos / path)[top:bottom, left:right]
        Image.fromarray(pixels).save(tmp_path / "cut" / label / path.rpartition("/")[2])
    encoder = trained_run / "encoder.safetensors"
    of_boxes = nearkin.embed(encoder, boxed, device="cpu", workers=0)
    by_hand = nearkin.embed(encoder, tmp_path / "cut", device="cpu", workers=0)
    order = np.argsort([path.rpartition("/")[2] for path in by_hand.paths])
    np.testing.assert_array_equal(of_boxes.vectors, np.asarray(by_hand.vectors)[order])


def test_commands_name_the_image_and_the_box_and_labels_refer_to_both(
    photos, trained_run, tmp_path, capsys, reports
):
    rows = [(f"images/{n}.png", *box, "") for n in range(4) for box in BOXES[:2]]
    boxed, out = table(photos / "all.csv", rows), tmp_path / "run"
    encoder = trained_run / "encoder.safetensors"
    assert run("embed", encoder, boxed, "-o", out, "--device", "cpu", "--workers", "0") == 0
    assert (out / "report.html").stat().st_size > 0
    assert run("select", out, "--num=2", "-o", tmp_path / "label.csv") == 0
    chosen = list(read_csv(tmp_path / "label.csv"))
    assert all("#" in row["path"] for row in chosen)
    rows = zip(open_images(str(boxed)).names, "ab" * 4, strict=True)
    labels = table(tmp_path / "labels.csv", rows, ("path", "label"))
    assert open_images(str(boxed), labels=str(labels)).labels.tolist() == [0, 1] * 4
    capsys.readouterr()
    assert run("duplicates", boxed) == 0
    assert "8 images" in capsys.readouterr().out


def test_images_of_other_channels_are_refused(tmp_path, refusal):
    import tifffile

    planes = dict(photometric="minisblack", planarconfig="separate")
    tifffile.imwrite(tmp_path / "deep.tif", np.ones((5, 30, 34), np.uint16), **planes)
    said = refusal(3, "check", table(tmp_path / "t.csv", [("deep.tif", 0, 0, 9, 9, "a")]))
    assert "boxes are of RGB images" in said


def test_a_column_of_a_table_of_boxes_is_read_by_box(photos, tmp_path):
    rows = [(photos / "images" / "0.png", *box, "xy"[at]) for at, box in enumerate(BOXES[:2])]
    boxed = table(photos / "cameras.csv", rows, (*HEADER[:-1], "camera"))
    images = open_images(str(boxed))
    found = dict(zip(images.names, column_of("camera", images, str(boxed)), strict=True))
    assert found == {f"images/0.png#{','.join(map(str, box))}": c for box, c in zip(BOXES, "xy")}
    labels = table(tmp_path / "labels.csv", [(name, "z") for name in found], ("path", "camera"))
    assert column_of("camera", images, str(labels)).tolist() == ["z", "z"]  # names of regions
    labels.write_text(labels.read_text().replace("camera", "label"))  # DATA has the column
    assert column_of("camera", images, str(labels), str(boxed)).tolist() == ["x", "y"]
    with pytest.raises(DataError, match=r"labels\.csv: no column 'hour' among: path, label"):
        column_of("hour", images, str(labels), str(boxed))
