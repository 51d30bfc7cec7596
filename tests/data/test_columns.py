"""Images in tables: Parquet, Arrow, folders and objects of `datasets`; patterns of shards."""

import json
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from builders import encoded, tar, write_files
from needs import need
from pyarrow import parquet

from nearkin.data import unpacked
from nearkin.data.cache import _held as held
from nearkin.data.opening import open_images
from nearkin.errors import DataError
from nearkin.run.folder import data_name, run_folder

IMAGES = [encoded(seed, (80, 70 + seed)) for seed in range(6)]
LABELS = [0, 1, 0, -1, 1, None]
FEATURES = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
METADATA = {"huggingface": json.dumps({"info": {"features": FEATURES}})}


def table(kind="struct", images=IMAGES):
    """What `datasets` writes: a struct of bytes and path, and numbers with names in the metadata."""
    if kind == "struct":
        cells = [{"bytes": image, "path": f"{row}.png"} for row, image in enumerate(images)]
        column = pa.array(cells, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    else:
        column = pa.array(images, getattr(pa, kind)())
    columns = {"image": column, "label": pa.array(LABELS[: len(images)], pa.int64())}
    return pa.table(columns).replace_schema_metadata(METADATA)


def write_arrow(path, content, kind="stream", **options):
    new = {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}[kind]
    with pa.OSFile(str(path), "wb") as file, new(file, content.schema, **options) as writer:
        writer.write_table(content, max_chunksize=4)
    return path


def assert_images(images, expected=IMAGES):
    assert [images.read(row) for row in range(len(images))] == expected
    assert images.sizes.tolist() == [[80, 70 + IMAGES.index(image)] for image in expected]
    assert images.classes == ("cat", "dog")
    labels = [LABELS[IMAGES.index(image)] for image in expected]
    assert images.labels.tolist() == [-1 if label is None else label for label in labels]


@pytest.mark.parametrize("form", ["parquet", "stream", "file", "compressed"])
def test_a_table_holds_its_images(tmp_path, cache, form):
    for number, kind in enumerate(("struct", "binary", "large_binary")):
        path = tmp_path / (f"{kind}.parquet" if form == "parquet" else f"{kind}.arrow")
        if form == "parquet":
            parquet.write_table(table(kind), path, row_group_size=4)
        elif form == "compressed":
            write_arrow(path, table(kind), options=pa.ipc.IpcWriteOptions(compression="zstd"))
        else:
            write_arrow(path, table(kind), form)
        images = open_images(path)
        assert list(images.names) == [f"{row:08}" for row in range(6)]
        assert_images(images)
        copies = list(cache.glob("tables/*"))
        in_place = form in ("stream", "file")
        assert len(copies) == (0 if in_place else number + 1), kind
        assert_images(open_images(path))
        assert list(cache.glob("tables/*")) == copies


def test_a_table_that_is_written_again_is_read_again(tmp_path):
    parquet.write_table(table(), tmp_path / "t.parquet")
    before = open_images(tmp_path / "t.parquet")
    parquet.write_table(table(images=IMAGES[:3][::-1]), tmp_path / "t.parquet")
    after = open_images(tmp_path / "t.parquet")
    assert [after.read(row) for row in range(3)] == IMAGES[2::-1]
    assert before.fingerprint != after.fingerprint


def test_a_row_without_an_image_is_bad(tmp_path):
    parquet.write_table(table(images=[*IMAGES[:2], None, b"no image"]), tmp_path / "t.parquet")
    images = open_images(tmp_path / "t.parquet")
    assert len(images) == 2
    assert images.reasons == {
        "00000002": "no bytes in the table",
        "00000003": "text, not an image",
    }


def test_groups_and_splits_of_a_table(tmp_path):
    extra = {"group": ["a", "a", "b", "", "", ""], "split": ["train"] * 4 + ["test", "validation"]}
    whole = table()
    for name, values in extra.items():
        whole = whole.append_column(name, pa.array(values))
    parquet.write_table(whole, tmp_path / "t.parquet")
    images = open_images(tmp_path / "t.parquet")
    assert images.groups.tolist() == [0, 0, 2, 3, 4, 5]
    assert images.splits.tolist() == ["train"] * 4 + ["test", "val"]
    named = {"split": {"names": ["test", "train"], "_type": "ClassLabel"}}
    for numbers in ([0, 1, 1, 0, 1, None], [0.0, 1.0, 1.0, 0.0, 1.0, None]):
        parts = with_features(named, split=numbers, label=[*"ababab"])
        parquet.write_table(parts, tmp_path / "t.parquet")
        images = open_images(tmp_path / "t.parquet")
        assert images.splits.tolist() == ["test", "train", "train", "test", "train", ""]


def test_a_table_that_ends_early_or_has_no_images_is_one_line(tmp_path):
    parquet.write_table(table(), tmp_path / "t.parquet")
    for path in (tmp_path / "t.parquet", write_arrow(tmp_path / "t.arrow", table())):
        path.write_bytes(path.read_bytes()[:-5000])
        says = rf"{path.name}: not a readable .*; write it"
        with pytest.raises(DataError, match=says) as caught:
            open_images(path)
        assert "\n" not in str(caught.value)
    for content, reason in (
        ({"label": [1, 2]}, "no column of images among: label"),
        ({"a": [b"1"], "b": [b"2"]}, "a, b"),
    ):
        parquet.write_table(pa.table(content), tmp_path / "t.parquet")
        with pytest.raises(DataError, match=reason):
            open_images(tmp_path / "t.parquet")


class TestDatasets:
    """What the library itself writes and holds."""

    @pytest.fixture
    def dataset(self):
        need("datasets")
        import datasets

        features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
        columns = {"image": [{"bytes": i, "path": None} for i in IMAGES], "label": LABELS}
        return datasets.Dataset.from_dict(columns, datasets.Features(features))

    def test_what_is_saved_to_disk(self, dataset, tmp_path, cache):
        dataset.save_to_disk(str(tmp_path / "saved"), num_shards=2)
        (tmp_path / "saved" / "cache-1f.arrow").write_bytes(b"of a map, left beside the data")
        images = open_images(tmp_path / "saved")
        assert_images(images)
        assert images.names[3] == "data-00001-of-00002.arrow/00000000"
        assert not (cache / "tables").exists()

    def test_parts_of_a_dictionary_are_splits(self, dataset, tmp_path):
        import datasets

        parts = {"train": dataset.select(range(4)), "test": dataset.select([4, 5])}
        datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
        images = open_images(tmp_path / "saved")
        assert images.splits.tolist() == ["test"] * 2 + ["train"] * 4
        assert_images(images, [*IMAGES[4:], *IMAGES[:4]])

    def test_an_object_and_a_stream_are_read_once(self, dataset, tmp_path, cache):
        import datasets

        dataset.to_parquet(str(tmp_path / "t.parquet"))
        how = {"streaming": True, "split": "train", "cache_dir": str(tmp_path / "hf")}
        stream = datasets.load_dataset("parquet", data_files=str(tmp_path / "t.parquet"), **how)
        opened = [open_images(each) for each in (dataset, dataset, stream)]
        for images in opened:
            assert_images(images)
        assert len(list((cache / "tables").iterdir())) == 1  # the same content, the same file
        assert len({images.fingerprint for images in opened}) == 1
        chosen = open_images(dataset.select([5, 0, 3, 1]))
        assert [chosen.read(row) for row in range(4)] == [IMAGES[row] for row in (5, 0, 3, 1)]
        assert chosen.labels.tolist() == [-1, 0, -1, 1]


class Named:
    """A `datasets.Dataset` of images that it has by their paths, as far as that library gives it."""

    __module__ = "datasets.arrow_dataset"

    def __init__(self, paths):
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        cells = [{"bytes": None, "path": path} for path in paths]
        self.table = pa.table({"image": pa.array(cells, kind), "label": list(range(len(paths)))})

    @property
    def features(self):
        return SimpleNamespace(arrow_schema=self.table.schema)

    def with_format(self, _):
        return self

    def iter(self, batch_size):
        yield from map(self.table.slice, range(0, len(self.table), batch_size), [batch_size] * 9)


def test_images_that_a_dataset_has_by_their_paths_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(write_files(tmp_path, {"a.png": IMAGES[0], "d/b.png": IMAGES[1]}))
    dataset = Named(["a.png", f"{tmp_path}/d/b.png", "gone.png", f"{tmp_path}/d"])
    images = open_images(dataset)
    assert [images.read(row) for row in range(len(images))] == IMAGES[:2]
    assert images.labels.tolist() == [0, 1]
    assert [bad.reason for bad in images.bad] == ["no bytes in the table"] * 2
    for name, metadata, classes in (("group", None, ()), ("label", METADATA, ("cat", "dog"))):
        renamed = dataset.table.rename_columns(["image", name])  # the same rows by other names
        dataset.table = renamed.replace_schema_metadata(metadata)
        assert open_images(dataset).classes == classes
    with pytest.raises(DataError, match="none of 1 images can be used"):
        open_images(Named(["gone.png"]))


def test_shards_by_a_pattern_with_labels_in_json(tmp_path, monkeypatch):
    labels = [b'{"label": "cat"}', b'{"cls": 1, "caption": "a dog"}', b"[]", b"{"]
    for shard in range(4):
        members = {"0001.json": labels[shard], "0001.png": IMAGES[shard], "0002.png": IMAGES[4]}
        write_files(tmp_path / "shards", {f"{shard:06}.tar": tar(members.items())})
    images = open_images(f"{tmp_path}/shards/{{000000..000002}}.tar")
    members = [f"00000{shard}.tar/000{member}.png" for shard in range(3) for member in (1, 2)]
    assert (list(images.names), images.classes) == (members, ("1", "cat"))
    assert images.labels.tolist() == [1, -1, 0, -1, -1, -1]
    monkeypatch.chdir(tmp_path)
    assert list(open_images("shards/00000{0,3}.tar").names)[2] == "000003.tar/0001.png"
    with pytest.raises(DataError, match=r"2 of 6 shards do not exist.*000004.tar"):
        open_images("shards/{000000..000005}.tar")
    assert data_name("shards/{0,1}.tar") == str(tmp_path / "shards" / "{0,1}.tar")
    assert run_folder(None, "shards/{0,1}.tar", "simclr", again=False).path.name == "shards-simclr"
    with pytest.raises(DataError, match="no range"):
        open_images("shards/{a..b}.tar")


def test_a_list_as_label_in_json_is_no_class_and_said(tmp_path):
    """As in tables; of one value it is that, and `cls` counts where `label` is a list."""
    said = [b'{"label": ["cat", "dog"]}', b'{"label": ["cat"]}', b'{"label": [], "cls": 0}',
            b'{"label": null}']  # fmt: skip
    members = {f"{n}.json": text for n, text in enumerate(said)}
    members |= {"4.cls": b"cat", "4.json": said[0]}
    members |= {f"{n}.png": IMAGES[n] for n in range(5)}
    images = open_images(write_files(tmp_path, {"s.tar": tar(members.items())}) / "s.tar")
    assert (images.classes, images.labels.tolist()) == (("0", "cat"), [-1, 1, 0, -1, 1])
    (note,) = images.notes
    assert str(note) == "left out: 1 labels that are not one class, such as \"['cat', 'dog']\""


def with_features(features, **columns):
    """A table with the description that `datasets` leaves in its metadata."""
    described = pa.table(
        {"image": [{"bytes": image, "path": None} for image in IMAGES], **columns}
    )
    info = features if isinstance(features, str) else json.dumps({"info": {"features": features}})
    return described.replace_schema_metadata({"huggingface": info})


def test_features_of_any_form_are_read(tmp_path):
    """Lists as of `datasets` before 4, dictionaries with a field called names, and no JSON."""
    labels = [n % 2 for n in range(len(IMAGES))]
    labels[0], labels[1] = -1, 7  # which have no names
    known = {"image": {"_type": "Image"}} | FEATURES
    captions = {"captions": [{"dtype": "string", "_type": "Value"}]}
    person = {"person": {"names": {"dtype": "string", "_type": "Value"}}}
    more = {"captions": [["a"]] * len(IMAGES), "person": [{"names": "x"}] * len(IMAGES)}
    path = tmp_path / "t.parquet"
    parquet.write_table(with_features(known | captions | person, label=labels, **more), path)
    images = open_images(path)
    assert images.classes == ("cat", "dog")
    assert images.labels.tolist() == [-1, -1, *labels[2:]]
    assert [str(note) for note in images.notes] == [
        "left out: 1 label -1, which means no label",
        "left out: 1 labels that are not one class, such as '7 of 2 classes'",
    ]
    parquet.write_table(with_features(captions | person, **more), path)
    assert open_images(path).classes == ()
    parquet.write_table(with_features(known), path)  # whose column of labels was dropped
    assert open_images(path).classes == ()
    for broken in ("{", "[]", '{"info": 3}', '{"info": {"features": [1]}}', "[" * 100_000):
        parquet.write_table(with_features(broken), path)
        assert len(open_images(path)) == len(IMAGES), broken


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_of_two_columns_of_classes_none_is_taken_and_both_are_noted(tmp_path, cache, form):
    """As the hub has CIFAR-100; split and group may have named classes beside a label."""
    path, numbers = tmp_path / f"t.{form}", [n % 2 for n in range(len(IMAGES))]

    def opened(*columns):
        features = dict.fromkeys(columns, FEATURES["label"])
        content = with_features(features, **dict.fromkeys(columns, numbers))
        write_arrow(path, content) if form == "arrow" else parquet.write_table(content, path)
        return open_images(path)

    images = opened("fine_label", "coarse_label")
    assert images.classes == ()
    assert [str(note) for note in images.notes] == [
        "left out: 2 columns of classes, of which none is called label; rename the one that is "
        "meant, such as 'fine_label', 'coarse_label'"
    ]
    images = opened("label", "coarse_label")
    assert (images.classes, images.notes) == (("cat", "dog"), ())


def test_more_tables_are_read_than_a_process_may_have_files_open_by_itself(tmp_path, cache):
    for number in range(20):
        parquet.write_table(table(images=IMAGES[:1]), tmp_path / f"{number}.parquet")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open() as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + 10, hard))
        try:
            assert len(open_images(tmp_path)) == 20
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for path in [*held]:
                os.close(held.pop(path))


def test_copies_of_tables_make_room_for_others_but_not_while_they_are_used(
    tmp_path, cache, monkeypatch
):
    monkeypatch.setattr(unpacked, "ROOM", 1)
    for number in range(3):
        parquet.write_table(table(images=IMAGES[number:]), tmp_path / f"{number}.parquet")
    open_images(tmp_path / "0.parquet")
    images = open_images(tmp_path / "1.parquet")
    assert len(list((cache / "tables").iterdir())) == 2  # both are held by this process
    assert images.read(0) == IMAGES[1]
    for path in [*held]:
        os.close(held.pop(path))
    open_images(tmp_path / "2.parquet")
    (left,) = (cache / "tables").iterdir()
    assert b"".join(IMAGES[2:4])[:50] in left.read_bytes()


def test_copies_of_one_data_set_do_not_make_room_for_each_other(tmp_path, cache, monkeypatch):
    """Although they exceed the limit: or all were copied again at each start."""
    monkeypatch.setattr(unpacked, "ROOM", 1)
    for number in range(4):
        name = f"data/{number}.parquet" if number else "other.parquet"
        (tmp_path / name).parent.mkdir(exist_ok=True)
        parquet.write_table(table(images=IMAGES[number:]), tmp_path / name)
    open_images(tmp_path / "other.parquet")

    def copies():
        for path in [*held]:  # as after the end of a process
            os.close(held.pop(path))
        return {path: path.stat().st_mtime_ns for path in (cache / "tables").iterdir()}

    def opened():
        assert len(open_images(tmp_path / "data")) == 3 * len(IMAGES) - 6
        return copies()

    copies()
    first = opened()
    assert len(first) == 3  # without the other one
    assert opened() == first
    lost = next(iter(first))
    lost.unlink()
    again = opened()
    assert again.keys() == first.keys()
    assert {path for path in first if first[path] == again[path]} == first.keys() - {lost}
