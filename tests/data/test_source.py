"""A class of the user's own is a source of images like any folder."""

import io
import json
import pickle
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
import torch
from builders import encoded
from nearkin_command import run
from PIL import Image

from nearkin.data.opening import open_images
from nearkin.errors import CheckpointError, DataError

QUICK = ("--backbone", "tiny", "--image-size", "16", "--batch-size", "4", "--epochs", "1")


def png(seed):
    return encoded(seed, (90, 80))


class Scans:
    """Twelve images of two classes; some encoded, some pixels."""

    def __init__(self, as_files=True, seed=0):
        self.names = [f"slide {row:02}" for row in reversed(range(12))]
        self.labels = [("benign", "malignant")[int(name[-1]) % 2] for name in self.names]
        self.as_files, self.seed = as_files, seed

    def read(self, name):
        row = int(name[-2:])
        if row == 3:
            raise KeyError(name)
        if not self.as_files:
            return np.full((8, 9), row, np.uint8)
        return b"no image" if row == 5 else png(row + self.seed)


def test_a_source_has_names_labels_and_images():
    for as_files in (True, False):
        images = open_images(Scans(as_files))
        bad = {"slide 03": "unreadable: KeyError: 'slide 03'"}
        bad |= {"slide 05": "text, not an image"} if as_files else {}
        assert images.reasons == bad
        good = [f"slide {row:02}" for row in range(12) if f"slide {row:02}" not in bad]
        assert (list(images.names), images.classes) == (good, ("benign", "malignant"))
        assert images.labels.tolist() == [int(name[-1]) % 2 for name in good]
        assert images.format_counts == {"PNG" if as_files else "array": len(good)}
        assert images.sizes[0].tolist() == ([90, 80] if as_files else [9, 8])
        if as_files:
            assert images.read(0) == png(0)
        else:
            assert images.read(4).tolist() == np.full((8, 9, 3), 5).tolist()
            assert images.fingerprint != open_images(Scans()).fingerprint
    own = type("Scans", (Scans,), {"__module__": "datasets.of_mine"})  # as a folder may be called
    assert len(open_images(own())) == 10
    first, same, other = (open_images(Scans(seed=seed)) for seed in (0, 0, 1))
    assert first.fingerprint == same.fingerprint  # that of its content
    assert (first.states == same.states).all()
    assert (first.states != other.states).any()


def test_a_source_may_give_pil_images_and_tensors():
    class Opened(Scans):
        def read(self, name):
            image = Image.open(io.BytesIO(super().read(name)))
            if name < "slide 06":
                return image
            return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    images = open_images(Opened())
    assert images.format_counts == {"array": 10}
    assert [file.name for file in images.bad] == ["slide 03", "slide 05"]
    for row, name in enumerate(images.names):
        assert (images.read(row) == np.asarray(Image.open(io.BytesIO(png(int(name[-2:])))))).all()


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i2", "<i4", "<u4", "<f4"])
def test_deep_pil_images_are_read_as_their_files_are(dtype, tmp_path):
    """Whether a folder has them, a source of one's own, or a list."""
    values = np.linspace(0, 30_000, 720).reshape(24, 30).astype(dtype)
    for number in range(3):
        tifffile.imwrite(
            tmp_path / f"{number}.tif", values, byteorder=">" if dtype[0] == ">" else "<"
        )
    names, read = list("012"), lambda name: Image.open(tmp_path / f"{name}.tif")
    folder = open_images(tmp_path, cache=False)
    assert str(folder.pixel_type) == f"1 {np.dtype(dtype).name}"
    for data in (SimpleNamespace(names=names, read=read), [read(name) for name in names]):
        images = open_images(data)
        assert images.channels == folder.channels
        assert (images.read(2) == folder.read(2)).all()


TENSORS = {
    "channels first": lambda x: x.movedim(-1, 1),
    "channels last": lambda x: x,
    "that require a gradient": lambda x: (x.movedim(-1, 1) / 255).requires_grad_(),
    "of bfloat16": lambda x: (x / 255).bfloat16(),
    "a list, channels first": lambda x: [one.movedim(-1, 0) for one in x],
    "a list, channels last": list,
    "with labels": lambda x: (x.movedim(-1, 1), torch.arange(len(x))),
    "a source, channels first": lambda x: of_source(x.movedim(-1, 1)),
    "a source, channels last": lambda x: of_source(x),
}


def of_source(x):
    return SimpleNamespace(names=list(map(str, range(len(x)))), read=lambda name: x[int(name)])


@pytest.mark.parametrize("how", TENSORS)
@pytest.mark.parametrize("count", [3, 5])
def test_tensors_are_images_in_either_layout(how, count):
    pixels = np.random.default_rng(0).integers(0, 256, (count, 20, 24, 3), np.uint8)
    images = open_images(TENSORS[how](torch.from_numpy(pixels)))
    read = np.stack([images.read(row) for row in range(count)])
    assert (abs(read - pixels.astype(int)) <= (how == "of bfloat16")).all()  # 8 bits, with a sign
    assert images.labels.tolist() == ([*range(count)] if how == "with labels" else [-1] * count)


LISTS = {
    "paths": lambda paths: [str(path) for path in paths],
    "relative paths": lambda paths: [path.relative_to(Path.cwd()) for path in paths],
    "encoded": lambda paths: [path.read_bytes() for path in paths],
    "PIL images": lambda paths: [Image.open(path) for path in paths],
    "arrays": lambda paths: [np.asarray(Image.open(path)) for path in paths],
    "an array of arrays": lambda paths: objects(np.asarray(Image.open(path)) for path in paths),
    "paths in a tuple": tuple,
    "paths in an array": lambda paths: np.array([str(path) for path in paths]),
    "tensors": lambda paths: [
        torch.from_numpy(np.array(Image.open(path))).movedim(-1, 0) for path in paths
    ],
}


def objects(arrays):
    arrays = [*arrays]
    array = np.empty(len(arrays), object)
    array[:] = arrays
    return array


@pytest.mark.parametrize("how", LISTS)
def test_a_list_has_images_of_any_sizes(how, tmp_path, monkeypatch):
    """As a folder of the same files has."""
    monkeypatch.chdir(tmp_path)
    shapes, draw = ((9, 8, 3), (12, 30, 3), (9, 8, 3), (40, 11, 3)), np.random.default_rng(0)
    pixels = [draw.integers(0, 256, shape, np.uint8) for shape in shapes]
    paths = [tmp_path / "scans" / f"{number}.png" for number in range(len(pixels))]
    paths[0].parent.mkdir()
    for path, image in zip(paths, pixels, strict=True):
        Image.fromarray(image).save(path)
    given = LISTS[how](paths)
    images = open_images((given, ["b", "a", None, "b"]))
    for row, image in enumerate(pixels):
        read = images.read(row)
        shown = np.asarray(Image.open(io.BytesIO(read))) if isinstance(read, bytes) else read
        assert (shown == image).all()
    assert (images.classes, images.labels.tolist()) == (("a", "b"), [1, 0, -1, 1])
    names = [f"{number}.png" if "paths" in how else f"{number}" for number in range(4)]
    assert [*images.names] == names  # those of the folder, wherever one works
    assert open_images(given).labels.tolist() == [-1] * 4
    assert len(pickle.loads(pickle.dumps(images))) == 4  # as processes get them


def test_folders_that_name_parts_do_so_where_files_are_listed_too(tmp_path):
    """Or images that are held out would be trained on."""
    paths = [tmp_path / part / f"{n}.png" for part in ("train", "test") for n in range(3)]
    for number, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png(number))
    names = [str(path.relative_to(tmp_path)) for path in paths]
    boxes = "\n".join(f"{name},0,0,4,4" for name in names)
    coco = {
        "images": [{"id": n, "file_name": name} for n, name in enumerate(names)],
        "categories": [{"id": 1, "name": "a"}],
        "annotations": [{"image_id": n, "category_id": 1, "bbox": [0, 0, 4, 4]} for n in range(6)],
    }
    tables = {
        "labels.csv": "path,label\n" + "\n".join(f"{name},{name[-5]}" for name in names),
        "empty.csv": "path,split\n" + "\n".join(f"{name}," for name in names),
        "boxes.csv": f"path,x0,y0,x1,y1\n{boxes}",
        "coco.json": json.dumps(coco),
    }
    for name, text in tables.items():
        (tmp_path / name).write_text(text)
    both = ([str(path) for path in paths], list("ababab"))
    for given in (tmp_path, paths, both, *(tmp_path / name for name in tables)):
        images = open_images(given)
        expected = [name.partition("/")[0] for name in images.names]
        assert images.splits.tolist() == expected, given
        assert set(expected) == {"train", "test"}
        assert given == tmp_path or images.notes == (), given
    assert open_images(both).classes == ("a", "b")
    assert set(open_images(paths[:3]).splits) == {""}
    # Where a column names parts, folders do not.
    (tmp_path / "own.csv").write_text("path,split\n" + f"{names[0]},test\n{names[1]},train\n")
    assert open_images(tmp_path / "own.csv").splits.tolist() == ["test", "train"]


def test_images_beside_the_folders_of_parts_are_noted_with_their_labels_or_without(tmp_path):
    names = ("train/a.png", "test/b.png", "c.png")
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(png(number))
    (folder,) = open_images(tmp_path).notes
    assert folder.text == (
        "1 image to train on beside the folders train and test, without a label"
    )
    labeled = open_images(([tmp_path / name for name in names], ["x", "y", "x"]))
    (of_list,) = labeled.notes
    assert of_list.text == "1 image to train on beside the folders train and test"
    assert (labeled.labels >= 0).all()


def test_a_function_in_a_file_may_give_a_list_of_paths(tmp_path):
    Image.new("RGB", (9, 8)).save(tmp_path / "one.png")
    code = tmp_path / "code" / "data.py"
    code.parent.mkdir()
    code.write_text(f"def load():\n    return [{str(tmp_path / 'one.png')!r}], ['cat']\n")
    images = open_images(f"{code}:load")
    assert (images.names, images.classes, images.notes) == (("one.png",), ("cat",), ())


def test_images_of_a_list_keep_their_own_depth():
    """Stacked, those of 8 bits would be nearly black beside those of 16."""
    images = open_images([np.full((9, 9), 200, np.uint8), np.full((9, 9), 60_000, np.uint16)])
    assert (images.read(0) == 200).all()
    assert [(file.name, "uint16" in file.reason) for file in images.bad] == [("1", True)]


def test_gray_tensors_are_images():
    pixels = torch.arange(3 * 8 * 9, dtype=torch.uint8).reshape(3, 8, 9)  # three are no channels
    for data in (pixels, pixels[:, None], list(pixels), of_source(pixels)):
        images = open_images(data)
        assert (images.read(2) == pixels[2].numpy()[..., None]).all()


def test_a_source_is_asked_by_the_names_that_it_gives():
    """Though images are called by composed letters, as those of a folder are."""
    split = unicodedata.normalize("NFD", "é.png")
    source = SimpleNamespace(
        names=[split, "a.png"], labels=["cat", "dog"], read={split: png(1), "a.png": png(0)}.get
    )
    images = open_images(source)
    assert (images.names, images.classes) == (("a.png", "é.png"), ("cat", "dog"))
    assert [images.read(row) for row in (0, 1)] == [png(0), png(1)]
    assert images.labels.tolist() == [1, 0]
    assert [(note.decision, note.count) for note in images.notes] == [("renamed", 1)]


class Broken(Scans):
    def __init__(self, reason="", **changes):
        super().__init__()
        self.reason = reason
        vars(self).update(changes)

    def read(self, name):
        if self.reason:
            raise RuntimeError(f"{self.reason} of {name}")
        return super().read(name)


def test_a_source_that_contradicts_itself_is_told():
    none = r"none of 12 images can be used, such as 'slide 00' \(.*: no disk of slide 00"
    for source, message in (
        (Broken(names=[]), "the data: 0 names; give at least one"),
        (Broken(names=["a", "a"]), "2 names; give at least one, each of its own"),
        (Broken(labels=["x"]), "12 images but 1 labels; give one each"),
        (Broken(splits=["left"] * 12), "split 'left'; say train, val or test"),
        (Broken("no disk"), none),
    ):
        with pytest.raises(DataError, match=message):
            open_images(source)
    images = open_images(Broken(splits=["train", "val"] * 6, groups=["left", "right"] * 6))
    assert (set(images.splits), len(set(images.groups))) == ({"train", "val"}, 2)


OWN_FILE = """
from pathlib import Path
import numpy as np


class Slides:
    def __init__(self):
        self.seed = int(Path(__file__).with_name("seed.txt").read_text())
        self.names = [f"{row:02}" for row in range(16)]
        self.labels = [str(row % 2) for row in range(16)]

    def read(self, name):
        rng = np.random.default_rng(self.seed + int(name))
        return rng.integers(0, 256, (18, 20, 3), np.uint8)
"""


def test_every_command_takes_a_source_from_a_file(tmp_path, capsys):
    file = tmp_path / "slides.py"
    file.write_text(OWN_FILE)
    file.with_name("seed.txt").write_text("0")
    data, out = f"{file}:Slides", tmp_path / "run"
    train = ("train", data, *QUICK, "--workers", "0", "--evaluate-every", "0", "-o", out)
    assert run(*train) == 0
    assert run("embed", out, data, "-o", tmp_path / "vectors.npz") == 0
    assert np.load(tmp_path / "vectors.npz")["vector"].shape[0] == 16
    assert run(*train, "--resume") == 0
    assert "already complete" in (out / "train.log").read_text()
    capsys.readouterr()
    evaluate = ("evaluate", out, "--protocol", "knn", "--trust-remote-code", "--json")
    assert run(*evaluate) == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["sizes"]["train"] == 15
    file.with_name("seed.txt").write_text("1")
    assert run(*train, "--resume") == CheckpointError.exit_code
