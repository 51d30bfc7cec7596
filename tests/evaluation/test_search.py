"""The images most similar to an image: exact, in order, and of nothing but sound tables."""

import itertools
import json
import os
import shutil

import builders
import numpy as np
import pyarrow as pa
import pytest
import torch
from builders import write_network
from nearkin_command import run as nearkin_command
from PIL import Image
from pyarrow import parquet

import nearkin
from nearkin.commands.embed import embed
from nearkin.commands.neighbors import Neighbor
from nearkin.errors import CheckpointError
from nearkin.evaluation.shards import Note, ShardFolder
from nearkin.evaluation.table import open_table
from nearkin.evaluation.vectors import BLOCK_SIZE

DIM = 128
"""Of the features of `tiny`."""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Thirty images, of which the last is a copy of the first."""
    names = [f"{('cat', 'dog')[number % 2]}/{number:02}.png" for number in range(29)]
    folder = builders.fill(tmp_path_factory.mktemp("images"), *names, size=(80, 72))
    shutil.copy(folder / "cat" / "00.png", folder / "dog" / "29.png")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, images):
    """A run with its table, and tables of all other kinds beside it; read, never written."""
    folder = write_network(tmp_path_factory.mktemp("run") / "encoder.safetensors").parent
    embed(folder, images, output=folder / "embeddings.parquet", workers=0)
    assert (
        nearkin_command("embed", folder, images, "-o", f"{folder}/shards/", "--shard-size=4") == 0
    )
    return folder


def write_table(path, vectors, group=None, /, **other):
    """A table as `embed` writes it."""
    vectors = np.asarray(vectors, np.float32)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    names = [f"{row}.png" for row in range(len(vectors))]
    columns = {"path": names, "label": [f"label {n}" for n in names], "vector": rows}
    parquet.write_table(pa.table(columns | other), path, row_group_size=group)
    return path


def write_folder(folder, vectors, shard, group=3):
    """A folder of shards of these vectors, which are read so many at once."""
    folder.mkdir()
    note = Note("", "", len(vectors), shard)
    for number, file in enumerate(ShardFolder(folder, note).files):
        write_table(file, vectors[number * shard : (number + 1) * shard], group)
    (folder / "_shards.json").write_text(json.dumps(vars(note)))
    return folder


def brute_force(vectors, query, top):
    """All similarities in float64, sorted in Python."""
    rows = np.asarray(vectors, np.float64)
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    similarity = (rows * (query / np.linalg.norm(query))).sum(1).round(6)
    order = sorted(range(len(rows)), key=lambda row: (-similarity[row], row))[:top]
    return order, similarity[order]


def search(table, queries, top):
    """What is found, by vectors of any length."""
    queries = torch.nn.functional.normalize(torch.tensor(np.asarray(queries, np.float32)))
    similarity, rows = table.nearest(queries, top)
    paths, labels = table.texts("path"), table.texts("label")
    return [
        [Neighbor(cosine, paths[row], labels[row]) for cosine, row in zip(*found)]
        for found in zip(similarity.tolist(), rows.tolist())
    ]


def neighbors_command(*arguments):
    return nearkin_command("neighbors", *arguments)


def answers(capsys, *arguments):
    """What the command finds, for each image."""
    assert neighbors_command(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def refused(refusal, run, images):
    """Ask for the neighbors of an image in a table that is refused; the line that says why."""

    def refused(code, table):
        return refusal(code, "neighbors", run, images / "cat" / "00.png", "--vectors", table)

    return refused


def test_what_is_found_is_what_comparing_all_finds(tmp_path):
    """Directions that are far apart and come up to six times, so that there are many ties."""
    cases = (3, 1, 1, 1), (16, 1, 1, 100), (100, 7, 3, 1), (3, 7, 3, 5), (3, 40, 7, 100)
    for case, (dim, count, shard, top) in enumerate((*cases, (100, 40, 100, 5), (16, 40, 1, 100))):
        rng = np.random.default_rng(dim * count)
        directions = rng.normal(size=(max(1, count // 4), dim))
        vectors = directions[rng.integers(0, len(directions), count)]
        queries = rng.normal(size=(4, dim))
        table = open_table(write_folder(tmp_path / f"{case}", vectors, shard))
        whole = open_table(write_table(tmp_path / "whole.parquet", vectors))
        expected = [brute_force(vectors.astype(np.float32), query, top) for query in queries]
        for result, (order, similarity) in zip(search(whole, queries, top), expected):
            assert [n.path for n in result] == [f"{row}.png" for row in order]
            np.testing.assert_allclose([n.similarity for n in result], similarity, atol=2e-6)
        for result, (order, _) in zip(search(table, queries, top), expected):
            assert [n.path for n in result] == [f"{row % shard}.png" for row in order]
            assert [n.label for n in result] == [f"label {row % shard}.png" for row in order]


def test_equal_images_are_in_the_order_of_the_table_wherever_blocks_begin(tmp_path):
    """For every size, since a product of matrices rounds by its shape."""
    for queries, count in itertools.product((1, 2, 5, 16), (7, 64, 333)):
        rng = np.random.default_rng(queries * count)
        vectors = rng.normal(size=(count, DIM))
        same = np.sort(rng.permutation(count)[:5])
        vectors[same] = vectors[same[0]]
        path = write_table(tmp_path / "t.parquet", vectors, count // 3)
        near = vectors[same[0]] + 0.1 * rng.normal(size=(queries, DIM))
        for neighbors in search(open_table(path), near, 5):
            assert [n.path for n in neighbors] == [f"{row}.png" for row in same]
    table = open_table(write_folder(tmp_path / "folder", np.ones((1000, 3)), 300))
    (neighbors,) = search(table, np.ones((1, 3)), 4)  # of a thousand equal ones
    one = pytest.approx(1)
    assert [(n.path, n.similarity) for n in neighbors] == [(f"{row}.png", one) for row in range(4)]


def test_blocks_hold_no_more_rows_than_are_said_and_rows_are_read_by_their_places(tmp_path):
    path = write_table(tmp_path / "t.parquet", np.ones((2 * BLOCK_SIZE + 5, 2)))
    assert [len(b) for b in open_table(path).blocks()] == [BLOCK_SIZE] * 2 + [5]
    table = open_table(write_folder(tmp_path / "folder", np.eye(40), 7))
    for rows in ([0], [39], [0, 5, 6, 7, 39], [13], list(range(40)), []):
        blocks = table.blocks(np.array(rows, int))
        assert [row for block in blocks for row in block.argmax(1).tolist()] == rows


def test_an_image_of_the_table_is_its_own_nearest_one_and_its_copy_the_next(
    run, images, capsys, tmp_path
):
    (answer,) = answers(capsys, run, images / "cat" / "00.png", "--top", 2)
    assert answer["image"] == str(images / "cat" / "00.png")
    found = answer["neighbors"]
    assert [n["path"] for n in found] == ["cat/00.png", "dog/29.png"]
    assert [n["label"] for n in found] == ["cat", "dog"]
    assert [n["similarity"] for n in found] == pytest.approx([1, 1], abs=1e-5)
    strange = tmp_path / "red\x1b[31m\n.png"
    shutil.copy(images / "cat" / "00.png", strange)
    assert neighbors_command(run, strange, "--top", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(tmp_path / r"red\x1b[31m\n.png")
    assert lines[1:] == ["   1.000  cat/00.png  cat", "   1.000  dog/29.png  dog"]


def test_queries_have_their_own_neighbors_in_any_order(run, images):
    files = [images / "dog" / "03.png", images / "cat" / "02.png", images / "dog" / "01.png"]
    found = nearkin.neighbors(run, files, top=1)
    assert [one.neighbors[0].path for one in found] == ["dog/03.png", "cat/02.png", "dog/01.png"]


def test_all_kinds_of_tables_give_the_same_answer(run, images, capsys):
    asked = [run, images / "dog" / "03.png", images / "cat" / "02.png", "--top", "30"]
    usual = answers(capsys, *asked)
    assert len(usual[0]["neighbors"]) == 30
    for table in ("embeddings.parquet", "shards"):
        for one, first in zip(
            answers(capsys, *asked, "--vectors", run / table), usual, strict=True
        ):
            assert [n["path"] for n in one["neighbors"]] == [n["path"] for n in first["neighbors"]]
            similar = [[n["similarity"] for n in each["neighbors"]] for each in (one, first)]
            assert similar[0] == pytest.approx(similar[1], abs=1e-6)


def test_an_image_is_seen_as_embed_sees_it(run, images, tmp_path):
    """Upright, without its transparency, from 16 bits, out of any folder and by any name."""
    exif = Image.Exif()
    exif[0x0112] = 6
    folder = tmp_path / "new"
    folder.mkdir()
    Image.linear_gradient("L").resize((300, 200)).convert("RGB").save(folder / "a.jpg", exif=exif)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "b.png")
    ramp = np.linspace(0, 65535, 40 * 30).reshape(40, 30).astype(np.uint16)
    Image.fromarray(ramp).save(folder / "c.png")
    embed(run, folder, output=tmp_path / "new.parquet", workers=0)
    (folder / "b.png").rename(folder / "no ending")
    files = [folder / name for name in ("c.png", "a.jpg", "no ending", "a.jpg")]
    found = nearkin.neighbors(run, files, vectors=tmp_path / "new.parquet", top=1)
    assert [f.neighbors[0].path for f in found] == ["c.png", "a.jpg", "b.png", "a.jpg"]
    assert [f.neighbors[0].similarity for f in found] == pytest.approx([1] * 4, abs=1e-6)


def test_an_image_that_cannot_be_read_is_named(run, images, tmp_path, refusal):
    image = images / "cat" / "00.png"
    whole = image.read_bytes()
    for kind, content in {"text": b"text", "torn": whole[: len(whole) // 2], "empty": b""}.items():
        (tmp_path / f"{kind}.png").write_bytes(content)
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    Image.new("1", (10_000, 10_000)).save(tmp_path / "bomb.png")
    for kind in ("text", "torn", "empty", "folder", "pipe", "bomb", "missing", "long" * 99):
        line = refusal(3, "neighbors", run, image, tmp_path / f"{kind}.png")
        assert f"{kind}.png' cannot be read" in line


def test_tables_that_are_not_there_or_not_complete_are_refused(
    run, images, tmp_path, refusal, refused
):
    image = images / "cat" / "00.png"
    bare = shutil.copy(run / "encoder.safetensors", tmp_path / "encoder.safetensors")
    assert "has no images of its own" in refusal(2, "neighbors", bare, image)
    assert "does not exist" in refused(2, tmp_path / "no.parquet")
    assert "no table of features" in refused(2, image)
    assert "has no _shards.json" in refused(2, tmp_path)
    refusal(2, "neighbors", run)
    refusal(2, "neighbors", run, "a.png", "--top", "0")
    folder = shutil.copytree(run / "shards", tmp_path / "shards")
    (folder / "shard-000003.parquet").unlink()
    assert "lacks 1 of 8 shards" in refused(5, folder)


def test_features_of_another_encoder_are_refused(run, images, tmp_path, refusal, refused):
    other = write_network(tmp_path / "other.safetensors", seed=2)
    line = refusal(5, "neighbors", other, images / "cat" / "00.png", "--vectors", run / "shards")
    assert "of another encoder" in line
    table = write_table(tmp_path / "t.parquet", np.ones((3, 5)))
    assert "have 5 features and the encoder gives 128" in refused(5, table)
    table = open_table(write_folder(tmp_path / "folder", np.ones((6, 4)), 3))
    write_table(table.files[1], np.ones((3, 5)))
    with pytest.raises(CheckpointError, match="vectors of 4 features and of 5; write it again"):
        list(table.blocks())
    nothing = pa.array([], pa.string())
    write_table(tmp_path / "t.parquet", np.ones((0, DIM)), path=nothing, label=nothing)
    assert "no image" in refused(3, tmp_path / "t.parquet")


ROWS = np.ones((3, DIM), np.float32)
LISTS = ROWS.tolist()


def with_middle(last):
    """Vectors of which the second ends so."""
    return {"vector": [LISTS[0], [*LISTS[0][:-1], last], LISTS[0]]}


MISSING = [LISTS[0], None, LISTS[0]]
HOSTILE = {
    "no path": {"path": None},
    "no label": {"label": None},
    "no vector": {"vector": None},
    "paths that are numbers": {"path": [1, 2, 3]},
    "labels that are lists": {"label": [["a"]] * 3},
    "vectors that are numbers": {"vector": [1.0, 2.0, 3.0]},
    "vectors of whole numbers": {"vector": [[1] * DIM] * 3},
    "vectors of vectors": {"vector": [[[1.0]] * DIM] * 3},
    "vectors of several lengths": {"vector": [LISTS[0], LISTS[0][:-1], LISTS[0] + [1.0]]},
    "vectors of no numbers": {"vector": pa.array([[]] * 3, pa.list_(pa.float32()))},
    "a vector that is missing": {"vector": pa.array(MISSING)},
    "a missing one of a fixed size": {"vector": pa.array(MISSING, pa.list_(pa.float32(), DIM))},
    "a number that is missing": with_middle(None),
    "a number that is none": with_middle(np.nan),
    "a number too large for float32": with_middle(1e300),
}


def test_hostile_tables_and_files_that_are_no_tables_are_refused(tmp_path, refused):
    columns = {"path": ["a", "b", "c"], "label": ["", "", ""], "vector": LISTS}
    for name, changed in HOSTILE.items():
        table = pa.table({k: v for k, v in (columns | changed).items() if v is not None})
        parquet.write_table(table, tmp_path / "t.parquet")
        line = refused(5, tmp_path / "t.parquet")
        assert "t.parquet cannot be used" in line or "have 0 features" in line, name
    ends = b"PAR1" + b"\xff" * 100 + b"PAR1"
    for content in (b"", b"path,label,vector\n", ends, b"PK\5\6" + bytes(18)):  # an empty zip
        path = tmp_path / "table.parquet"
        path.write_bytes(content)
        assert f"{path.name} cannot be used" in refused(5, path), content


def test_a_sound_table_of_another_program_is_taken(run, images, tmp_path):
    """Its vectors are lists of any length, small or large, and some labels are missing."""
    columns = {"path": ["a", "b"], "label": pa.array([None, "x"], pa.string())}
    vectors = [[1.0] * DIM, [-1.0] * DIM]
    for kind in (pa.list_(pa.float64()), pa.large_list(pa.float64())):
        table = pa.table({**columns, "vector": pa.array(vectors, kind)})
        parquet.write_table(table, tmp_path / "t.parquet")
        (answer,) = nearkin.neighbors(run, [images / "cat/00.png"], vectors=tmp_path / "t.parquet")
        assert [(n.path, n.label) for n in answer.neighbors] == [("a", ""), ("b", "x")]


def test_flipped_bytes_are_refused_or_change_no_more_than_numbers(run, images, tmp_path, capsys):
    sound = (run / "embeddings.parquet").read_bytes()
    query = images / "cat" / "00.png"
    labels = lambda answer: {each["path"]: each["label"] for each in answer["neighbors"]}
    (found,) = answers(capsys, run, query, "--top", 30)
    for place in np.linspace(0, 0.999, 12):
        content = bytearray(sound)
        content[int(place * len(content))] ^= 0xFF
        (tmp_path / "t.parquet").write_bytes(content)
        arguments = (run, query, "--vectors", tmp_path / "t.parquet", "--top", 30, "--json")
        code = neighbors_command(*arguments)
        printed = capsys.readouterr()
        assert code in (0, 3, 5), (place, printed.err)
        if code == 0:
            (answer,) = json.loads(printed.out)
            assert labels(answer) == labels(found), place
