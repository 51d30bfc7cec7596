"""Features in shards: whole or not at all, by any number of processes, and the same at the end."""

import csv
import json
import os
import shutil
import sys
from pathlib import Path

import builders
import kills
import numpy as np
import pyarrow as pa
import pytest
from builders import contents, write_files, write_network
from kills import Aim
from nearkin_command import run as nearkin_command
from processes import srun
from pyarrow import dataset, parquet

import nearkin
from nearkin.commands.embed import embed, embed_files
from nearkin.errors import OutputError
from nearkin.evaluation import shards as module
from nearkin.evaluation.shards import SHARD
from nearkin.files import whole, writing
from nearkin.schema import parameter_docs

PICTURES, BAD = 26, ["cat/03.png", "cat/06.png", "cat/07.png", "cat/08.png", "dog/02.png"]
"""Of which 06 to 08 are a whole shard by threes; dog/02 already shows in its header."""
SHARD_OF_3 = 9
"""Shards of three images, without the one that is no image."""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    names = [f"{label}/{n:02d}.png" for label in ("cat", "dog") for n in range(PICTURES // 2)]
    folder = builders.fill(tmp_path_factory.mktemp("data") / "images", *names, size=(70, 70))
    for name in BAD[:4]:
        path = folder / name
        path.write_bytes(path.read_bytes()[:5000])  # found when it is decoded
    (folder / BAD[4]).write_text("no image")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_network(tmp_path_factory.mktemp("run") / "encoder.safetensors")


def arguments(run, images, output, *more):
    """The command that writes shards of three images."""
    command = ("embed", run, images, "-o", f"{output}/", "--shard-size", "3", *more)
    return [str(word) for word in command]


def embedded(run, images, output, *more):
    """The exit code of that command."""
    return nearkin_command(*arguments(run, images, output, *more))


@pytest.fixture(scope="module")
def shards(tmp_path_factory, run, images):
    """What an unbroken command makes; read, never written."""
    folder = tmp_path_factory.mktemp("shards") / "vectors"
    assert embedded(run, images, folder) == 0
    return folder


@pytest.fixture
def copied(shards, tmp_path):
    """A copy of these shards, to be damaged."""
    return shutil.copytree(shards, tmp_path / "vectors")


def times(files):
    """When files were written."""
    return {path: path.stat().st_mtime_ns for path in files}


def test_the_shards_are_one_table_with_the_rows_of_the_single_file(shards, run, images, tmp_path):
    embed(run, images, output=tmp_path / "one.parquet", workers=0)
    one = parquet.read_table(tmp_path / "one.parquet")
    for table in (parquet.read_table(shards), dataset.dataset(shards).to_table()):
        assert table.schema.equals(one.schema, check_metadata=False)
        for column in ("path", "split", "label"):
            assert table[column].to_pylist() == one[column].to_pylist()
        result, expected = (np.array(t["vector"].to_pylist(), np.float32) for t in (table, one))
        np.testing.assert_allclose(result, expected, atol=1e-6)


def test_shards_of_whole_batches_have_the_bits_of_the_single_file(run, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (600, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=pixels)
    command = ["embed", run, tmp_path / "data.npz", "-o"]
    assert nearkin_command(*command, tmp_path / "one.parquet") == 0
    assert nearkin_command(*command, f"{tmp_path / 'shards'}/", "--shard-size", "256") == 0
    one, table = (parquet.read_table(tmp_path / name) for name in ("one.parquet", "shards"))
    assert table.equals(one)
    sizes = [
        parquet.read_metadata(p).num_rows for p in sorted((tmp_path / "shards").glob("shard-*"))
    ]
    assert sizes == [256, 256, 88]


def test_a_shard_has_so_many_images_less_those_that_cannot_be_read(shards):
    files = sorted(shards.glob("shard-*"))
    assert [f.name for f in files] == [f"shard-{n:06}.parquet" for n in range(SHARD_OF_3)]
    rows = [parquet.read_metadata(file).num_rows for file in files]
    assert rows == [3, 2, 0, 3, 3, 3, 3, 3, 1]
    vectors = pa.list_(pa.field("element", pa.float32()), 128)
    assert {parquet.read_schema(f).field("vector").type for f in files} == {vectors}
    with (shards / "_bad_files.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["path"] for row in rows) == BAD
    assert all(row["reason"] for row in rows)
    assert not set(BAD) & set(parquet.read_table(shards)["path"].to_pylist())


def test_data_without_bad_images_leave_no_list_of_them_and_nothing_else_is_an_error(
    run, images, tmp_path, refusal
):
    sound, *broken = ((images / name).read_bytes() for name in ("cat/00.png", *BAD[:2]))
    good = write_files(tmp_path / "good", {"0.png": sound})
    bad = write_files(tmp_path / "bad", {f"{n}.png": content for n, content in enumerate(broken)})
    (tmp_path / "there").mkdir()
    shards = ("--shard-size", "9")
    for _ in range(2):  # what was begun as a folder of shards goes on as one
        assert nearkin_command("embed", run, good, "-o", tmp_path / "there", *shards) == 0
        shards = ()
    assert set(contents(tmp_path / "there")) == {"_shards.json", "shard-000000.parquet"}
    line = refusal(3, "embed", run, bad, "-o", tmp_path / "out", "--shard-size", "9")
    assert "none of the 2 images can be read" in line


def test_python_writes_the_same_into_a_folder(shards, run, images, tmp_path):
    made = nearkin.embed_shards(run, images, output=tmp_path / "vectors", shard_size=3)
    assert made.missing == 0
    assert contents(tmp_path / "vectors") == contents(shards)
    assert f"{SHARD:,}" in parameter_docs(embed_files)["shard_size"]


WRITE = "nearkin.evaluation.shards.ShardFolder.write"


def test_a_command_that_was_killed_goes_on_and_ends_with_the_same_bytes(
    shards, run, images, tmp_path
):
    folder, typed = tmp_path / "vectors", arguments(run, images, tmp_path / "vectors")
    aim = Aim(WRITE, WRITE, "before")
    killed = kills.start(typed, lambda: kills.set_up(aim, "simclr", nth=4))
    assert kills.finish(killed) == -9
    before = times(folder.glob("shard-*"))
    assert len(before) == 3
    assert embedded(run, images, folder) == 0
    assert contents(folder) == contents(shards)
    assert times(before) == before


def test_a_shard_that_was_being_written_is_no_shard_and_goes_in_the_end(
    shards, copied, run, images, refusal
):
    torn, sound = copied / ".shard-000004.parquet.partial.123", copied / "shard-000004.parquet"
    torn.write_bytes(sound.read_bytes()[:100])
    sound.unlink()
    (copied / "_bad_files.csv").unlink()  # which a kill prevented, and is written later
    assert parquet.read_table(copied).num_rows == PICTURES - len(BAD) - 3
    assert embedded(run, images, copied) == 0
    assert contents(copied) == contents(shards)
    sound.write_bytes(b"PAR1 no more PAR1")
    line = refusal(5, *arguments(run, images, copied))
    assert "shard-000004.parquet cannot be used" in line


def test_a_process_that_another_one_overtakes_in_the_last_shard_is_no_error(
    copied, shards, run, images, monkeypatch
):
    """The other one removes its partial file, as one that a killed process has left."""
    last = max(copied.glob("*.parquet"))
    last.unlink()
    write = module.write_parquet

    def overtaken(file, *more):
        write(file, *more)
        monkeypatch.undo()
        assert embedded(run, images, copied) == 0

    monkeypatch.setattr(module, "write_parquet", overtaken)
    assert embedded(run, images, copied) == 0
    assert contents(copied) == contents(shards)


def test_a_file_that_cannot_be_finished_leaves_the_old_one_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write():
        with writing(path), whole(path) as partial:
            partial.write_text("new")
            with Path("/dev/full").open("w") as full:
                full.write("x")

    with pytest.raises(OutputError, match=r"cannot write .*No space left"):
        write()
    assert contents(tmp_path) == {"file": b"old"}


TORCHRUN = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
SRUN = [srun(rank, "1") for rank in range(2)]


def test_two_processes_at_once_make_what_one_makes(shards, run, images, tmp_path):
    folder, said = tmp_path / "vectors", [tmp_path / f"said-{rank}.txt" for rank in range(2)]

    def started(rank):
        def prepare():
            os.environ.update(SRUN[rank])
            sys.stdout = sys.stderr = said[rank].open("w", buffering=1)

        return kills.start(arguments(run, images, folder), prepare)

    both = [started(rank) for rank in range(2)]
    assert [kills.finish(child) for child in both] == [0, 0], [x.read_text() for x in said]
    assert said[0].read_text()
    assert said[1].read_text() == "", "only the first speaks"
    assert contents(folder) == contents(shards)


def test_each_process_makes_every_second_shard(run, images, tmp_path, monkeypatch, capsys):
    for first in (0, 1):
        for name, value in TORCHRUN[first].items():
            monkeypatch.setenv(name, value)
        folder = tmp_path / f"{first}"
        assert embedded(run, images, folder) == 0
        made = {f"shard-{number:06}.parquet" for number in range(first, SHARD_OF_3, 2)}
        assert contents(folder).keys() == made | {"_shards.json"}
        assert ("others are to make 4 missing shards" in capsys.readouterr().out) == (first == 0)


def test_the_jobs_of_an_array_make_what_one_makes(shards, run, images, tmp_path):
    folder = tmp_path / "vectors"
    for shard in ("2/4", "4/4", "1/4"):
        assert embedded(run, images, folder, "--shard", shard) == 0
    missing = [n for n in range(SHARD_OF_3) if not (folder / f"shard-{n:06}.parquet").exists()]
    assert missing == [2, 6]
    assert embedded(run, images, folder, "--shard", "3/4") == 0
    assert contents(folder) == contents(shards)


def test_shares_that_make_no_sense_are_refused(run, images, tmp_path, monkeypatch, refusal):
    folder = tmp_path / "vectors"
    for shard in ("0/3", "4/3", "1", "1/0", "a/b", "-1/3", "1/3/5"):
        assert "is not I/N" in refusal(2, *arguments(run, images, folder, f"--shard={shard}")), (
            shard
        )
    assert "--shard-size 0" in refusal(
        2, "embed", run, images, "-o", f"{folder}/", "--shard-size", 0
    )
    for option in (("--shard", "1/2"), ("--shard-size", "5")):
        line = refusal(2, "embed", run, images, "-o", tmp_path / "one.parquet", *option)
        assert "of one file" in line
    for name, value in TORCHRUN[0].items():
        monkeypatch.setenv(name, value)
    line = refusal(2, *arguments(run, images, folder, "--shard", "1/2"))
    assert "leave --shard out" in line
    assert not any(tmp_path.iterdir())


def test_folders_of_something_else_are_refused_and_left_alone(
    shards, run, images, tmp_path, refusal
):
    before = contents(shards)
    other = write_network(tmp_path / "encoder.safetensors", seed=2)
    assert "another encoder;" in refusal(4, *arguments(other, images, shards))
    fewer = shutil.copytree(images, tmp_path / "fewer")
    (fewer / "cat" / "00.png").unlink()
    assert "another data;" in refusal(4, *arguments(run, fewer, shards))
    line = refusal(4, "embed", run, images, "-o", shards, "--shard-size", 4)
    assert "another --shard-size, 3;" in line
    assert contents(shards) == before
    # Other labels are other data, and so are other groups.
    table = images.parent / "table.csv"
    names = sorted(path.relative_to(images.parent) for path in images.rglob("*.png"))
    command = arguments(run, table, tmp_path / "v")
    table.write_text("path,label\n" + "".join(f"{name},a\n" for name in names))
    assert nearkin_command(*command) == 0
    table.write_text("path,label\n" + "".join(f"{name},b\n" for name in names))
    assert "another data;" in refusal(4, *command)
    table.write_text("path,label,group\n" + "".join(f"{name},a,p\n" for name in names))
    assert "another data;" in refusal(4, *command)


def test_a_folder_that_holds_anything_else_or_a_damaged_note_is_refused(
    run, images, tmp_path, refusal, copied
):
    write_files(tmp_path / "other", {"shard-000000.parquet": b"mine"})
    assert "is not empty" in refusal(4, *arguments(run, images, tmp_path / "other"))
    assert contents(tmp_path / "other") == {"shard-000000.parquet": b"mine"}
    before = contents(images)
    for more in ([], ["--overwrite"]):  # no run folder is made among images
        refusal(4, "embed", run, images, "-o", images, *more)
        assert contents(images) == before
    (tmp_path / "file").write_text("mine")
    assert "cannot write" in refusal(4, *arguments(run, images, tmp_path / "file"))
    note = json.loads((copied / "_shards.json").read_text())
    changes = [{"shard": value} for value in (0, -3, "x", None)]
    changes += [{"images": value} for value in (10**30, float("inf"), 0)]
    texts = [json.dumps(note | change) for change in changes]
    for text in [*texts, "", "[]", "{}", "[" * 100_000, "\xff", "[1, 2, 3, 4]"]:
        (copied / "_shards.json").write_text(text, encoding="latin-1")
        line = refusal(5, *arguments(run, images, copied))
        assert "_shards.json cannot be used" in line, text[:99]
