"""Folders, tables, archives, arrays and named sets all become the same kind of `Images`."""

import io
import os
import pickle
import struct
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.io
import torch
import torchvision
from builders import encoded, exchange, fill, tar
from PIL import ExifTags, Image
from sklearn.datasets import load_digits

from nearkin.data.decode import as_image, decode
from nearkin.data.labels import class_names
from nearkin.data.notes import Note
from nearkin.data.opening import open_images
from nearkin.data.union import union
from nearkin.errors import DataError
from nearkin.types import UNLABELED


def test_a_flat_folder_has_names_in_byte_order_and_no_labels(tmp_path):
    images = open_images(fill(tmp_path, "b.png", "a.PNG", "Z.png", "é.png"))
    assert images.names == ("Z.png", "a.PNG", "b.png", "é.png")
    assert (images.labels == UNLABELED).all()
    assert images.classes == ()
    assert (images.groups == np.arange(4)).all()
    assert images.splits.tolist() == [""] * 4
    assert (images.sizes == [20, 10]).all()
    assert images.format_counts == {"PNG": 4}
    assert images.read(0) == (tmp_path / "Z.png").read_bytes()
    assert images.bad == ()


def test_folders_can_be_insisted_on(tmp_path):
    fill(tmp_path, "a/1.png", "b/c/1.png")
    assert open_images(tmp_path, labels="folders").classes == ("a", "b/c")
    fill(tmp_path, "stray.png")
    with pytest.raises(DataError, match=r"stray\.png: lies in no class folder"):
        open_images(tmp_path, labels="folders")


def test_folders_are_classes_if_they_look_like_it(tmp_path):
    cases = (
        ("cat/1 cat/2 dog/1 dog/2", ("cat", "dog")),
        ("set/A/x/1 set/A/x/2 set/B/x/1 set/B/x/2", ("A/x", "B/x")),  # without the wrapper
        ("10/1 10/2 9/1 9/2", ("9", "10")),  # in the order of numbers
        ("bus/1 bus/2 train/1 train/2", ("bus", "train")),  # among others, a class, no split
        ("cat/1 cat/2 dog/1 dog/2 Cat/1 Cat/2", ("Cat", "cat", "dog")),
        ("cat/1 cat/2 1 2", ()),  # some lie in no folder
        ("cat/1 cat/2 cat/3", ()),  # one folder only
        ("a/1 b/1 c/1", ()),  # one image each
        ("a/1 a/2 b/c/1 b/c/2", ("a", "b/c")),
        ("a/1 a/2 a/x/3 b/1 b/2", ("a", "b")),  # all below a class folder is of that class
    )
    for number, (names, classes) in enumerate(cases):
        root = fill(tmp_path / str(number), *(f"{name}.png" for name in names.split()))
        images = open_images(root)
        assert (images.classes, images.splits.tolist()) == (classes, [""] * len(images))
        known = [name.removeprefix("set/").rpartition("/")[0] for name in images.names]
        known = [name.removesuffix("/x") if name == "a/x" else name for name in known]
        assert class_names(images) == (known if classes else [""] * len(known))
        said = {"Cat": "differ by case", "a/x": "unequal depth", "b/c": "unequal depth"}
        said |= {"c": "no classes, as 3 images are too few"}
        expected = [text for folder, text in said.items() if (root / folder).exists()]
        assert len(images.notes) == len(expected)
        assert all(text in note.text for text, note in zip(expected, images.notes, strict=True))
        assert (open_images(root, labels="none").labels == UNLABELED).all()


def test_the_header_decides_and_not_the_extension(tmp_path):
    """Though it starts late in the file; and sizes are those of the upright image."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 30)).save(tmp_path / "a.jpg", exif=exif)
    (tmp_path / "b.jpg").write_bytes(encoded(kind="PNG"))
    (tmp_path / "c.tif").write_bytes(encoded(kind="WEBP"))
    Image.new("RGB", (300, 200)).save(tmp_path / "d.jpg", exif=b"Exif\0\0" + b"\0" * 65_000)
    large = Image.fromarray(np.zeros((300, 300, 3), np.uint8))
    large.save(tmp_path / "e.jpg", icc_profile=b"\1" * 200_000)
    images = open_images(tmp_path)
    assert images.sizes.tolist() == [[30, 40], [20, 10], [20, 10], [300, 200], [300, 300]]
    assert images.format_counts == {"JPEG": 3, "PNG": 1, "WEBP": 1}


def test_links_are_followed_but_not_round_in_a_circle_and_what_is_hidden_is_passed_over(
    tmp_path, monkeypatch
):
    data, outside = tmp_path / "data", tmp_path / "outside"
    fill(data, "real/a.png", ".pool/b.png", ".b.png", ".thumbs/c.png", "real/.e/f.png")
    fill(outside, "c.png")
    (data / "inside.png").symlink_to("real/a.png")
    (data / "leaves.png").symlink_to(outside / "c.png")
    (data / "folder").symlink_to(outside)
    (data / "pool").symlink_to(".pool")
    (data / "loop").symlink_to(".")
    (data / "real" / "up").symlink_to("..")
    (data / "above").symlink_to("/")
    (data / "dangling.png").symlink_to("nothing.png")
    (data / "dangling.txt").symlink_to("nothing.txt")
    (data / "dangling").symlink_to("/nowhere")
    (data / "self.png").symlink_to("self.png")
    names = ("folder/c.png", "inside.png", "leaves.png", "pool/b.png", "real/a.png")
    inside = open_images(data)
    assert (inside.names, len(inside.bad)) == ((names[1], *names[3:]), 2)
    led = next(note for note in inside.notes if "link" in note.text)
    assert (led.decision, led.count, led.examples) == ("left out", 2, ("folder", "leaves.png"))
    assert f"2 links out of {data}, to {tmp_path}; NEARKIN_LINKS=follow reads them" in led.text
    monkeypatch.setenv("NEARKIN_LINKS", "follow")
    images = open_images(data)
    assert images.names == names
    assert [images.read(row) for row in (0, 2)] == [(outside / "c.png").read_bytes()] * 2
    assert images.reasons == dict.fromkeys(("dangling.png", "self.png"), "broken link")
    led, passed = (note for note in images.notes if "classes" not in note.text)
    assert (led.decision, led.count, led.examples) == ("guessed", 2, ("folder", "leaves.png"))
    assert f"2 links out of {data}, to {tmp_path}, followed" in str(led)
    assert (passed.decision, passed.count) == ("left out", 9)
    assert "9 files (4 hidden, 4 without a suffix, 1 .txt)" in str(passed)


def test_any_name_that_a_file_system_allows_can_be_read(tmp_path):
    odd = ["-x", "~", "a\nb", "tab\t", "\u202ertl", "😀", "x" * 250]
    fill(tmp_path, *(f"{name}.png" for name in odd))
    (tmp_path / os.fsdecode(b"\xff\xfe.png")).write_bytes(encoded())
    for images in (open_images(tmp_path), open_images(tmp_path)):  # scanned, then recalled
        assert len(images) == len(odd) + 1
        assert list(images.names) == sorted(images.names, key=os.fsencode)
        assert all(decode(images.read(row)).size == (20, 10) for row in range(len(images)))


def test_a_folder_without_images_says_what_it_holds(tmp_path):
    with pytest.raises(DataError, match=r"no images .*it is empty"):
        open_images(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        open_images(tmp_path / "nothing")
    for name in ("a.txt", "b.TXT", "c.py", "README"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"found 2 \.txt, 1 without a suffix, 1 \.py\)") as raised:
        open_images(tmp_path)
    assert "\n" not in str(raised.value)
    (tmp_path / "a.png").touch()
    with pytest.raises(DataError, match=r"none of 1 .* 'a\.png' \(empty file\)"):
        open_images(tmp_path)
    (tmp_path / "a.docx").touch()
    with pytest.raises(DataError, match="not a kind of data"):
        open_images(tmp_path / "a.docx")
    with pytest.raises(DataError, match=r"none of 1 .* 'a\.png' \(empty file\)"):
        open_images(tmp_path / "a.png")


def test_one_image_is_data_as_if_it_lay_alone_in_a_folder(tmp_path):
    alone = open_images(fill(tmp_path / "alone", "a.png"))
    fill(tmp_path / "others/cat", "b.png", "c.png")
    (tmp_path / "others/cat/a.png").write_bytes((tmp_path / "alone/a.png").read_bytes())
    one = open_images(tmp_path / "others/cat/a.png")
    assert one.names == alone.names == ("a.png",)
    assert one.classes == alone.classes == ()
    assert one.fingerprint == alone.fingerprint
    assert one.read(0) == alone.read(0)
    assert one.notes == alone.notes == ()


def test_a_second_start_reads_no_header_but_of_what_has_changed(tmp_path):
    first = open_images(fill(tmp_path, "a.png", "b.png"))
    exchange(tmp_path / "a.png")
    again = open_images(tmp_path)
    assert again.names == first.names
    assert (again.sizes == first.sizes).all()
    assert open_images(tmp_path, cache=False).names == ("b.png",)
    (tmp_path / "a.png").write_bytes(encoded(size=(33, 22)))
    (tmp_path / "b.png").unlink()
    images = open_images(fill(tmp_path, "c.png", "a2.png"))
    assert (images.names, images.sizes[0].tolist()) == (("a.png", "a2.png", "c.png"), [33, 22])


def test_files_without_a_time_are_read_again(tmp_path):
    """As tar --mtime=@0 and reproducible builds leave them: of another version, it is the same."""
    path = fill(tmp_path, "a.png") / "a.png"
    os.utime(path, ns=(0, 0))
    first = open_images(tmp_path)
    exchange(path, path.read_bytes()[:-1] + b"x")
    assert open_images(tmp_path).contents[0] != first.contents[0]


def test_an_index_that_is_damaged_or_cannot_be_written_costs_nothing(tmp_path, cache, monkeypatch):
    open_images(fill(tmp_path, "a.png"))
    (stored,) = cache.rglob("*.npz")
    for damage in (b"", b"not an index", stored.read_bytes()[:100]):
        stored.write_bytes(damage)
        assert len(open_images(tmp_path)) == 1
    assert len(list(cache.rglob("*"))) == 2  # its folder and the file: nothing left over
    monkeypatch.setenv("XDG_CACHE_HOME", str(stored))
    assert len(open_images(tmp_path)) == 1


def table(root, text, name="table.csv"):
    (root / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return root / name


def test_a_table_gives_images_labels_groups_and_splits(tmp_path):
    fill(tmp_path, "x/1.png", "x/2.png", "3.png", "unlisted.png")
    text = "path,label,group,split\nx/2.png,dog,g,train\nx/1.png,cat,g,val\n./3.png,,,\n"
    images = open_images(table(tmp_path, text))
    assert images.names == ("3.png", "x/1.png", "x/2.png")
    assert class_names(images) == ["", "cat", "dog"]
    assert images.splits.tolist() == ["", "val", "train"]
    assert images.groups[0] != images.groups[1] == images.groups[2]
    assert (open_images(tmp_path / "table.csv", labels="none").labels == UNLABELED).all()


def test_a_table_may_have_a_mark_semicolons_quotes_windows_paths_and_rows_twice(tmp_path):
    fill(tmp_path, "1.png", "x/1.png", "x/2;3.png")
    text = '\ufeffPath;Label\r\nx\\1.png;"a\nb"\r\n"x/2;3.png";=1+1\r\n\r\n'
    images = open_images(table(tmp_path, text))
    assert class_names(images) == ["a\nb", "=1+1"]
    assert len(open_images(table(tmp_path, "path,label\n1.png,a\n1.png,a\n"))) == 1
    with pytest.raises(DataError, match=r"'1\.png' is described in line 2 and, .* line 4"):
        open_images(table(tmp_path, "path,label\n1.png,a\n1.png,a\n1.png,b\n"))


def test_a_wrong_table_is_refused_in_one_line(tmp_path):
    fill(tmp_path, "1.png")
    for text, message in (
        ("file,label\n1.png,a\n", "no column 'path' among: file, label"),
        ("path,label\n1.png,a,b\n", "line 2: 3 cells for 2 columns"),
        ("path,label\n1.png,a\n,b\n", "line 3: no path"),
        ("label,path\na,1.png\nb\n", "line 3: no path"),
        ("path,label,split\n1.png,a,other\n", "line 2: split 'other'"),
        ("path,label\n9.png,a\n8.png,a\n1.png,a\n", r"2 of 3 files do not exist.*'9\.png', '8"),
        ("path,label\n/etc/passwd,a\n", r"none of 1 images .*passwd' \(text, not an image\)"),
        ("path,label\nx/../../y.png,a\n", r"1 of 1 files do not exist .*'x/\.\./\.\./y\.png'"),
        ("path,label\n" + "x" * 9_000 + ".png,a\n", "1 of 1 files do not exist"),
        ("path,Path\n1.png,a\n", "line 1: no header of different names"),
        (b"\xff\xfep\0a\0t\0h\0", "line 1: .* save it as UTF-8"),
        ("path,label\n1\0.png,a\n", "do not exist"),
        ("path,split\n1.png,\x1b[31m\n", "line 2: split"),  # and nothing steers the terminal
        (bytes(1_000_000), r"table\.csv"),
        ("," * 1_000_000 + "\n", r"table\.csv"),
        ("path,label\n", "no rows"),
        ("", "line 1: no header"),
        ("path,label\n1.png," + "x" * 200_000, "field larger than"),
    ):
        with pytest.raises(DataError, match=message) as raised:
            open_images(table(tmp_path, text))
        assert str(raised.value).isprintable()
    with pytest.raises(DataError, match=r"bad\.parquet: not a readable Parquet"):
        open_images(table(tmp_path, b"PAR1 no", "bad.parquet"))


def test_a_table_of_labels_belongs_to_a_folder(tmp_path):
    fill(tmp_path / "data", "train/a/1.png", "test/a/2.png", "test/b/3.png")
    labels = table(tmp_path, "path,label\ntest\\a\\2.png,x\ntrain/a/1.png,y\ngone.png,x\n")
    images = open_images(tmp_path / "data", labels=str(labels))
    assert class_names(images) == ["x", "", "y"]
    assert (images.splits.tolist(), len(images.notes)) == (["test", "test", "train"], 1)
    assert images.notes[0].text.startswith("1 of 3 rows of ")
    assert (images.notes[0].decision, images.notes[0].examples) == ("left out", ("gone.png",))
    labels = table(tmp_path, "path,label\ndata/a.png,x\ndata/b.png,x\n")  # which match nothing
    with pytest.raises(DataError, match=r"'data/a\.png', 'data/b\.png'.*'test/a/2\.png', '"):
        open_images(tmp_path / "data", labels=str(labels))
    with pytest.raises(DataError, match="no column 'label'"):
        open_images(tmp_path / "data", labels=str(table(tmp_path, "path\na.png\n")))


def test_arrays_and_npz_files_hold_the_same_images(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (12, 8, 9, 3), dtype=np.uint8)
    y = np.arange(12) % 3
    np.savez(tmp_path / "d.npz", x=x, y=y)
    for images in (open_images((x, y)), open_images(tmp_path / "d.npz")):
        assert (images.names[:2], images.names[-1]) == (("00", "01"), "11")
        assert images.classes == ("0", "1", "2")
        assert (images.labels == y).all()
        assert all((images.read(row) == x[row]).all() for row in range(12))
        assert (images.sizes.tolist(), images.format_counts) == ([[9, 8]] * 12, {"array": 12})
        assert images.is_small
    assert (open_images(x).labels == UNLABELED).all()


def test_pil_images_of_a_list_are_what_their_files_are(tmp_path):
    """Upright and in RGB, whatever their mode; gray of 16 bits keeps its bits."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    photo, turned = Image.fromarray(pixels), Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    gray16 = Image.fromarray(pixels[..., 0] * np.uint16(257))
    for number, (image, kind) in enumerate([
        (photo.quantize(16), "PNG"), (photo, "JPEG"), (gray16, "PNG"),
        *((photo.convert(mode), "PNG") for mode in ("1", "L", "LA", "RGBA")),
        (photo.convert("CMYK"), "TIFF"),
    ]):  # fmt: skip
        path = tmp_path / f"{number}.{kind.lower()}"
        image.save(path, **({"exif": turned} if kind != "TIFF" else {}))
        with Image.open(path) as opened:
            listed = open_images([opened])
        alone = open_images(path)
        assert listed.sizes.tolist() == alone.sizes.tolist(), path
        assert listed.channels == alone.channels, path
        found, expected = (np.asarray(as_image(each.read(0))) for each in (listed, alone))
        assert (found == expected).all(), path
    cut = io.BytesIO(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="truncated"):
        open_images([Image.open(cut)] * 3)


def test_gray_and_float_arrays_become_rgb_bytes():
    gray = np.random.default_rng(0).integers(0, 256, (4, 8, 8), dtype=np.uint8)
    for array in (gray, gray[..., None], gray / 255, (gray / 255).astype(np.float32)):
        got = open_images(array).read(1)
        assert got.dtype == np.uint8
        assert (got == gray[1][..., None]).all()


def test_only_labels_that_occur_are_named():
    x = np.zeros((4, 8, 8), np.uint8)
    tracemalloc.start()
    images = open_images((x, np.array([3_000_000, -1, 20, 20])))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (images.classes, images.labels.tolist()) == (("20", "3000000"), [1, UNLABELED, 0, 0])
    assert peak < 1e6


def test_an_npz_may_have_parts_and_class_names(tmp_path):
    x = np.zeros((3, 8, 8), np.uint8)
    arrays = {"x_train": x, "y_train": [1, 0, -1], "x_test": x[:2] + 1, "y_test": [0, 1]}
    np.savez(tmp_path / "d.npz", **arrays, class_names=["dog", "cat"])
    images = open_images(tmp_path / "d.npz")
    assert images.names == ("test/0", "test/1", "train/0", "train/1", "train/2")
    assert images.splits.tolist() == ["test"] * 2 + ["train"] * 3
    assert class_names(images) == ["dog", "cat", "cat", "dog", ""]
    assert [str(note) for note in images.notes] == ["left out: 1 label -1, which means no label"]
    assert (images.classes, images.read(0).max()) == (("cat", "dog"), 1)
    for names, dimensions in (("dog", 0), ([["dog", "hound"], ["cat", "tom"]], 2)):
        np.savez(tmp_path / "d.npz", **arrays, class_names=names)
        with pytest.raises(DataError, match=f"class_names has {dimensions} dimensions"):
            open_images(tmp_path / "d.npz")


def test_labels_may_be_a_tensor_of_any_type():
    x, labels = np.zeros((4, 8, 8), np.uint8), torch.tensor([0, 1, 1, 0])
    learned = labels.double().requires_grad_()
    for given in (labels, labels[:, None], labels.bfloat16(), learned):
        for pixels in (x, list(x)):
            assert class_names(open_images((pixels, given))) == ["0", "1", "1", "0"], given


def test_numbers_of_named_classes_may_be_floats_and_nan_is_none(tmp_path):
    def opened(*labels):
        arrays = {"x": np.zeros((3, 8, 8), np.uint8), "y": labels}
        np.savez(tmp_path / "d.npz", **arrays, class_names=["dog", "cat"])
        return open_images(tmp_path / "d.npz", cache=False)

    assert class_names(opened(0.0, np.nan, 1.0)) == ["dog", "", "cat"]
    assert class_names(opened(1.0, -1.0, 1.0)) == ["cat", "", "cat"]
    for labels in ((0.0, 1.0, 0.5), (0.0, np.nan, 2.0), (0.0, 1.0, -2.0)):
        with pytest.raises(DataError, match=f"label {labels[2]} is no number of 2 classes"):
            opened(*labels)


class Parts(dict):
    """A `datasets.DatasetDict`, as far as its type and methods tell."""

    __module__ = "datasets.dataset_dict"

    def with_format(self):
        raise AssertionError("a dictionary is read by no format")


def test_a_dictionary_of_datasets_is_refused_and_its_parts_are_named():
    with pytest.raises(DataError, match=r"^the data: a dictionary of train, test; give one of"):
        open_images(Parts(train=[], test=[]))


def test_arrays_that_are_no_images_are_refused(tmp_path):
    x = np.zeros((4, 8, 8), np.uint8)
    for wrong in (x[0], x.reshape(4, 2, 4, 8), x[:0], x.astype(np.int64), x + np.nan, x - 1.0):
        with pytest.raises(DataError, match="give"):
            open_images(wrong)
    np.savez(tmp_path / "keys.npz", pixels=x)
    np.savez(tmp_path / "names.npz", x=x, y=[0, 1, 2, 3], class_names=["a", "b"])
    np.savez(tmp_path / "images.npz", x_train_1=x, x_test=x, x_train_2=x)
    np.savez(tmp_path / "labels.npz", x=x, y=[0, 1, 2, 3], labels=[0, 1, 2, 3])
    for wrong, says in (
        ((x, np.zeros(3, int)), "4 images but 3 labels"),
        (([x[0], x[0, :7]], [1]), "2 images but 1 labels; give one each"),
        ([], "a list of no images; give one or more"),
        ([(x[0], 1)], "tuple is no image; give a PIL image, an array or a tensor"),
        (([tmp_path / "keys.npz"] * 2, ["a", "b"]), "in line 1 and, differently, in line 2"),
        (
            [tmp_path / "keys.npz", "nothing.png"],
            "nothing.png: no such file; give paths of images",
        ),
        (np.zeros((9, 8, 3), np.uint8), r"shape \(9, 8, 3\) is one image; give a list of images"),
        (iter(x), "type iterator is not read; give a folder, an array or a list of images"),
        (tmp_path / "keys.npz", "keys are pixels"),
        (tmp_path / "names.npz", "label 2 is no number of 2 classes; count from 0"),
        (tmp_path / "images.npz", "x_train_1 and x_train_2 are both images of one part; keep one"),
        (tmp_path / "labels.npz", "y and labels are both labels of one part; keep one"),
    ):
        with pytest.raises(DataError, match=says):
            open_images(wrong)


def test_an_npz_that_holds_objects_or_is_cut_short_is_refused(tmp_path):
    path = tmp_path / "d.npz"
    np.savez(path, x=np.array([{}], object))
    contents = [path.read_bytes()]
    np.savez_compressed(path, x=np.random.default_rng(0).integers(0, 9, (9, 9, 9), np.uint8))
    contents += [path.read_bytes()[: int(s * path.stat().st_size)] for s in (0, 0.1, 0.5, 0.95)]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(DataError, match="not a readable"):
            open_images(path)


def test_digits_are_those_of_scikit_learn_and_no_folder_of_that_name_in_silence(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    images, dataset = open_images("digits"), load_digits()
    assert (len(images), images.notes, images.classes) == (1797, (), tuple("0123456789"))
    assert (images.labels == dataset.target).all()
    assert images.read(0).shape == (16, 16, 3)
    enlarged = np.stack([images.read(row)[..., 0] for row in range(100)]).astype(float)
    shrunk = enlarged.reshape(100, 8, 2, 8, 2).mean((2, 4)) / 255 * 16
    assert np.abs(shrunk - dataset.images[:100]).mean() < 0.7
    fill(tmp_path / "digits", "one.png")
    both = open_images("digits")
    assert len(both) == 1797
    text = "the built-in data set digits for the folder of that name, which is ./digits"
    assert both.notes == (Note("substituted", text, 1797),)
    assert open_images("./digits").names == ("one.png",)


def test_a_torchvision_set_is_read_from_disk_and_never_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARKIN_TORCHVISION", str(tmp_path))
    with pytest.raises(DataError, match="download it once with") as raised:
        open_images("torchvision:MNIST")
    assert "\n" not in str(raised.value)
    with pytest.raises(DataError, match="not a known data set; there are CIFAR10"):
        open_images("torchvision:ImageNet")
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    image_head, label_head = struct.pack(">IIII", 2051, 5, 28, 28), struct.pack(">II", 2049, 5)
    for side in ("train", "t10k"):
        (raw / f"{side}-images-idx3-ubyte").write_bytes(image_head + pixels.tobytes())
        (raw / f"{side}-labels-idx1-ubyte").write_bytes(label_head + bytes([3, 1, 4, 1, 5]))
    images = open_images("torchvision:MNIST")
    assert len(images) == 10
    assert class_names(images)[:3] == ["3 - three", "1 - one", "4 - four"]
    assert (images.read(7)[..., 0] == pixels[2]).all()
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)
    for part in ("train", "test"):
        stored = {"X": pixels, "y": np.array([[3], [1], [10], [1], [5]])}  # 10 is a zero
        scipy.io.savemat(tmp_path / f"{part}_32x32.mat", stored)
    monkeypatch.setattr(torchvision.datasets.SVHN, "_check_integrity", lambda _: True)
    images = open_images("torchvision:SVHN")
    assert len(images) == 10
    assert class_names(images)[:3] == ["3", "1", "0"]
    assert (images.read(7) == pixels[..., 2]).all()


def test_a_subset_keeps_everything_of_its_rows(tmp_path):
    images = open_images(fill(tmp_path, "a/1.png", "a/2.png", "b/3.png", "b/4.png"))
    part = images.subset(np.array([1, 3]))
    assert (part.names, part.labels.tolist()) == (("a/2.png", "b/4.png"), [0, 1])
    assert (part.classes, part.read(1)) == (images.classes, images.read(3))
    assert part.format_counts == {"PNG": 2}
    assert part.fingerprint != images.fingerprint
    assert len(images.subset(np.zeros(0, np.int64))) == 0
    with pytest.raises(ValueError, match="ascend"):
        images.subset(np.array([3, 1]))


def test_a_pickled_subset_is_as_small_as_it_is(tmp_path):
    """Loaders send it to each of their processes, and it reads there what it reads here."""
    names = [f"{number:04}.png" for number in range(400)]
    folder = fill(tmp_path / "data", *names)
    (tmp_path / "d.tar").write_bytes(tar((name, (folder / name).read_bytes()) for name in names))
    files, packed = open_images(folder), open_images(tmp_path / "d.tar")
    arrays = open_images(np.zeros((400, 8, 8), np.uint8))
    unions = union(files, packed, "packed/"), union(union(arrays, files, "f/"), packed, "p/")
    for images in (files, packed, arrays, *unions):
        part = images.subset(np.array([0, 7, len(images) - 1]))
        written = pickle.dumps(part.subset(np.array([1, 2])))
        assert len(written) < 3_000 < len(pickle.dumps(images)) / 3
        for row, original in enumerate((7, len(images) - 1)):
            expected = images.read(original)
            assert np.array_equal(pickle.loads(written).read(row), expected)
    files = {name: encoded(row) for row, name in enumerate(names[:40])}
    own = open_images(SimpleNamespace(names=[*files], read=files.get))
    assert pickle.loads(pickle.dumps(own.subset(np.array([3, 9])))).read(1) == encoded(9)


def test_the_fingerprint_is_of_the_images_and_not_of_the_labels(tmp_path):
    fill(tmp_path, "a/1.png", "a/2.png", "b/3.png", "b/4.png")
    images = open_images(tmp_path)
    assert images.fingerprint == open_images(tmp_path, labels="none").fingerprint
    (tmp_path / "a/1.png").write_bytes(encoded(size=(40, 40)))
    assert open_images(tmp_path).fingerprint != images.fingerprint
    x = np.zeros((4, 8, 8), np.uint8)
    first = open_images(x).fingerprint
    assert first == open_images((x, np.arange(4))).fingerprint
    assert first != open_images(x + 1).fingerprint


def test_images_up_to_64_pixels_are_held_at_the_size_of_views_if_memory_allows(tmp_path):
    for side, small in ((64, True), (65, False)):
        files = open_images(fill(tmp_path, "a.png", size=(side, 3)))
        arrays = open_images(np.zeros((2, 64, side), np.uint8))
        assert files.is_small == arrays.is_small == bool(files.held_side(32)) == small
    square, wide = (open_images(np.zeros((600, 8, side), np.uint8)) for side in (8, 12))
    assert [square.held_side(side) for side in (8, 1544, 1545, 2240)] == [8, 1544, 0, 0]  # 4 GiB
    assert [wide.held_side(side) for side in (8, 32)] == [12, 32]


def test_a_spread_is_even_over_the_rows_and_has_as_many_as_it_may():
    images = open_images(np.zeros((10, 8, 8), np.uint8))
    for count, rows in {1: "0", 2: "09", 4: "0369", 10: "0123456789", 99: "0123456789"}.items():
        assert images.spread(count).names == tuple(rows), count
    assert len(images.subset(np.zeros(0, np.int64)).spread(1)) == 0
    many = open_images(np.zeros((50, 2, 2), np.uint8))
    assert [len(many.spread(count)) for count in (0, 1, 7, 49, 50)] == [0, 1, 7, 49, 50]
