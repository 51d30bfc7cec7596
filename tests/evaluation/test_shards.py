"""Features in parts: whole or not at all, by any number of processes, and the same at the end."""

import csv
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import dataset, parquet

import nearkin
from nearkin.cli import main
from nearkin.cli.train import EmbedOptions
from nearkin.commands.embed import embed, embed_parts
from nearkin.config import field_docs
from nearkin.encoders.encoder import write_encoder
from nearkin.errors import OutputError
from nearkin.evaluation.table import SHARD
from nearkin.networks.backbone import build_backbone
from nearkin.tables import whole, writing

PICTURES, BAD = 26, ["cat/03.png", "cat/06.png", "cat/07.png", "cat/08.png", "dog/02.png"]
"""Of which 06 to 08 are a whole part by threes; dog/02 already shows in its header."""
SHARD_OF_3 = 9
"""Parts of three images, without the one that is no image."""


def write_run(path, seed=1):
    torch.manual_seed(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    details = {"backbone": "tiny", "image_size": 16}
    write_encoder(path, build_backbone("tiny", 16), details)
    return path


def save_images(folder):
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(PICTURES // 2):
            pixels = rng.integers(0, 256, (70, 70, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number:02d}.png")
    for name in BAD[:4]:
        path = folder / name
        path.write_bytes(path.read_bytes()[:5000])  # found when it is decoded
    (folder / BAD[4]).write_text("no image")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "images")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run") / "encoder.safetensors")


def arguments(run, images, output, *more):
    return ["embed", str(run), str(images), "-o", f"{output}/", "--shard", "3", *more]


@pytest.fixture(scope="module")
def parts(tmp_path_factory, run, images):
    """What an unbroken command makes; read, never written."""
    folder = tmp_path_factory.mktemp("parts") / "vectors"
    assert main(arguments(run, images, folder)) == 0
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(command, code, capsys):
    assert main([str(argument) for argument in command]) == code
    err = capsys.readouterr().err.splitlines()
    (line,) = [line for line in err if line.startswith("error: ")]
    assert "a bug" not in line
    return line


def start(command, **variables):
    return subprocess.Popen(
        [sys.executable, "-m", "nearkin", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


# What is written


def test_the_parts_are_one_table_with_the_rows_of_the_single_file(parts, run, images, tmp_path):
    embed(run, images, output=tmp_path / "one.parquet", workers=0)
    one = parquet.read_table(tmp_path / "one.parquet")
    for table in (parquet.read_table(parts), dataset.dataset(parts).to_table()):
        assert table.schema.equals(one.schema, check_metadata=False)
        for column in ("path", "split", "label"):
            assert table[column].to_pylist() == one[column].to_pylist()
        result, expected = (np.array(t["vector"].to_pylist(), np.float32) for t in (table, one))
        np.testing.assert_allclose(result, expected, atol=1e-6)


def test_parts_of_whole_batches_have_the_bits_of_the_single_file(run, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (600, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=pixels)
    command = ["embed", str(run), str(tmp_path / "data.npz"), "-o"]
    assert main([*command, str(tmp_path / "one.parquet")]) == 0
    assert main([*command, f"{tmp_path / 'parts'}/", "--shard", "256"]) == 0
    one, table = (parquet.read_table(tmp_path / name) for name in ("one.parquet", "parts"))
    assert table.equals(one)
    sizes = [parquet.read_metadata(p).num_rows for p in sorted((tmp_path / "parts").glob("p*"))]
    assert sizes == [256, 256, 88]


def test_a_part_has_so_many_images_less_those_that_cannot_be_read(parts):
    files = sorted(parts.glob("part-*"))
    assert [f.name for f in files] == [f"part-{n:06}.parquet" for n in range(SHARD_OF_3)]
    rows = [parquet.read_metadata(file).num_rows for file in files]
    assert rows == [3, 2, 0, 3, 3, 3, 3, 3, 1]
    assert {parquet.read_schema(f).field("vector").type for f in files} == {
        pa.list_(pa.field("element", pa.float32()), 128)
    }


def test_images_that_cannot_be_read_are_listed_with_the_reason(parts):
    with (parts / "_bad_files.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["path"] for row in rows) == BAD
    assert all(row["reason"] for row in rows)
    assert not set(BAD) & set(parquet.read_table(parts)["path"].to_pylist())


def test_data_without_bad_images_leave_no_list_of_them(run, images, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(images / "cat" / "00.png", folder)
    (tmp_path / "there").mkdir()  # a folder that exists needs no / behind its name
    assert main(["embed", str(run), str(folder), "-o", str(tmp_path / "there")]) == 0
    assert set(contents(tmp_path / "there")) == {"_parts.json", "part-000000.parquet"}


def test_images_none_of_which_can_be_read_are_an_error(run, images, tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in BAD[:2]:
        shutil.copy(images / name, folder)
    line = refusal(["embed", run, folder, "-o", f"{tmp_path / 'out'}/"], 3, capsys)
    assert "none of the 2 images can be read" in line


def test_python_writes_the_same_into_a_folder(parts, run, images, tmp_path):
    made = nearkin.embed_parts(run, images, tmp_path / "vectors", shard=3)
    assert made.missing == 0
    assert contents(tmp_path / "vectors") == contents(parts)


def test_the_command_line_has_the_default_of_the_function():
    assert EmbedOptions().shard is None  # then it is the function's
    assert inspect.signature(embed_parts).parameters["shard"].default == SHARD == 65_536
    assert f"{SHARD:,}" in field_docs(EmbedOptions)["shard"]


# Kills


def test_a_command_that_was_killed_goes_on_and_ends_with_the_same_bytes(
    parts, run, images, tmp_path
):
    folder = tmp_path / "vectors"
    killed = start(arguments(run, images, folder))
    while not (folder / "part-000001.parquet").exists():
        assert killed.poll() is None, killed.communicate()[1]
        time.sleep(0.001)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    before = {path: path.stat().st_mtime_ns for path in folder.glob("part-*")}
    assert len(before) < SHARD_OF_3
    assert main(arguments(run, images, folder)) == 0
    assert contents(folder) == contents(parts)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_part_that_was_being_written_is_no_part_and_goes_in_the_end(
    parts, run, images, tmp_path
):
    folder = shutil.copytree(parts, tmp_path / "vectors")
    torn = folder / ".part-000004.parquet.partial.123"
    torn.write_bytes((folder / "part-000004.parquet").read_bytes()[:100])
    (folder / "part-000004.parquet").unlink()
    assert parquet.read_table(folder).num_rows == PICTURES - len(BAD) - 3
    assert main(arguments(run, images, folder)) == 0
    assert contents(folder) == contents(parts)


def test_a_list_of_bad_images_that_a_kill_prevented_is_written_later(parts, run, images, tmp_path):
    folder = shutil.copytree(parts, tmp_path / "vectors")
    (folder / "_bad_files.csv").unlink()
    assert main(arguments(run, images, folder)) == 0
    assert contents(folder) == contents(parts)


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


def test_a_damaged_part_is_named_when_the_others_are_made(parts, run, images, tmp_path, capsys):
    folder = shutil.copytree(parts, tmp_path / "vectors")
    (folder / "part-000004.parquet").write_bytes(b"PAR1 no more PAR1")
    line = refusal(arguments(run, images, folder), 5, capsys)
    assert "part-000004.parquet cannot be used" in line


# Several processes

TORCHRUN = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
SRUN = [
    {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "1",
    }
    for rank in range(2)
]  # fmt: skip


def test_two_processes_at_once_make_what_one_makes(parts, run, images, tmp_path):
    folder = tmp_path / "vectors"
    both = [start(arguments(run, images, folder), **variable) for variable in SRUN]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[1] == ("", "")  # only the first speaks
    assert contents(folder) == contents(parts)


@pytest.mark.parametrize("first", [0, 1])
def test_each_process_makes_every_second_part(first, run, images, tmp_path, monkeypatch, capsys):
    for name, value in TORCHRUN[first].items():
        monkeypatch.setenv(name, value)
    assert main(arguments(run, images, tmp_path)) == 0
    assert sorted(path.name for path in tmp_path.glob("part-*")) == [
        f"part-{number:06}.parquet" for number in range(first, SHARD_OF_3, 2)
    ]
    assert not (tmp_path / "_bad_files.csv").exists()
    assert ("4 parts are still missing" in capsys.readouterr().out) == (first == 0)


def test_the_jobs_of_an_array_make_what_one_makes(parts, run, images, tmp_path):
    for part in ("2/4", "4/4", "1/4"):
        assert main(arguments(run, images, tmp_path / "v", "--part", part)) == 0
    missing = [n for n in range(SHARD_OF_3) if not (tmp_path / f"v/part-{n:06}.parquet").exists()]
    assert missing == [2, 6]
    assert main(arguments(run, images, tmp_path / "v", "--part", "3/4")) == 0
    assert contents(tmp_path / "v") == contents(parts)


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "1/0", "a/b", "-1/3", "1/3/5"])
def test_a_share_that_makes_no_sense_is_refused(part, run, images, tmp_path, capsys):
    line = refusal(arguments(run, images, tmp_path / "v", f"--part={part}"), 2, capsys)
    assert "is not I/N" in line
    assert not (tmp_path / "v").exists()


def test_a_share_by_hand_and_processes_contradict_each_other(
    run, images, tmp_path, monkeypatch, capsys
):
    for name, value in TORCHRUN[0].items():
        monkeypatch.setenv(name, value)
    line = refusal(arguments(run, images, tmp_path / "v", "--part", "1/2"), 2, capsys)
    assert "leave --part out" in line


@pytest.mark.parametrize("option", [("--part", "1/2"), ("--shard", "5")])
def test_a_single_file_has_no_parts(option, run, images, tmp_path, capsys):
    command = ["embed", run, images, "-o", tmp_path / "one.parquet", *option]
    assert "is one file" in refusal(command, 2, capsys)


def test_a_part_of_no_image_is_refused(run, images, tmp_path, capsys):
    command = ["embed", run, images, "-o", f"{tmp_path / 'v'}/", "--shard", 0]
    assert "--shard 0" in refusal(command, 2, capsys)


# Folders of something else


def test_another_encoder_is_refused(parts, images, tmp_path, capsys):
    other = write_run(tmp_path / "encoder.safetensors", seed=2)
    assert "another encoder;" in refusal(arguments(other, images, parts), 4, capsys)


def test_other_images_or_other_labels_are_refused(parts, run, images, tmp_path, capsys):
    fewer = shutil.copytree(images, tmp_path / "fewer")
    (fewer / "cat" / "00.png").unlink()
    assert "another data;" in refusal(arguments(run, fewer, parts), 4, capsys)
    table = images.parent / "table.csv"
    names = sorted(path.relative_to(images.parent) for path in images.rglob("*.png"))
    for label in ("a", "b"):
        table.write_text("path,label\n" + "".join(f"{name},{label}\n" for name in names))
        command = arguments(run, table, tmp_path / "v")
        if label == "a":
            assert main(command) == 0
            capsys.readouterr()
    assert "another data;" in refusal(command, 4, capsys)


def test_another_size_of_the_parts_is_refused_and_the_old_one_named(
    parts, run, images, tmp_path, capsys
):
    command = ["embed", run, images, "-o", parts, "--shard", 4]
    assert "another --shard, 3;" in refusal(command, 4, capsys)


def test_what_is_refused_is_left_alone(parts, images, tmp_path, capsys):
    before = contents(parts)
    other = write_run(tmp_path / "encoder.safetensors", seed=2)
    refusal(arguments(other, images, parts), 4, capsys)
    assert contents(parts) == before


def test_a_folder_that_holds_anything_else_is_refused(run, images, tmp_path, capsys):
    (tmp_path / "part-000000.parquet").write_text("mine")
    assert "is not empty" in refusal(arguments(run, images, tmp_path), 4, capsys)
    assert contents(tmp_path) == {"part-000000.parquet": b"mine"}
    assert "is not empty" in refusal(["embed", run, images, "-o", images], 4, capsys)
    (tmp_path / "file").write_text("mine")
    assert "cannot write" in refusal(arguments(run, images, tmp_path / "file"), 4, capsys)


@pytest.mark.parametrize(
    "change",
    [
        {"shard": 0}, {"shard": -3}, {"shard": "x"}, {"shard": None}, {"images": 10**30},
        {"images": float("inf")}, {"images": 0},
    ],
)  # fmt: skip
def test_a_damaged_note_is_refused(change, parts, run, images, tmp_path, capsys):
    folder = shutil.copytree(parts, tmp_path / "vectors")
    note = json.loads((folder / "_parts.json").read_text())
    (folder / "_parts.json").write_text(json.dumps(note | change))
    line = refusal(arguments(run, images, folder), 5, capsys)
    assert "_parts.json cannot be used" in line


@pytest.mark.parametrize("note", ["", "[]", "{}", "[" * 100_000, "\xff", "[1, 2, 3, 4]"])
def test_a_note_that_is_none_is_refused(note, parts, run, images, tmp_path, capsys):
    folder = shutil.copytree(parts, tmp_path / "vectors")
    (folder / "_parts.json").write_text(note, encoding="latin-1")
    refusal(arguments(run, images, folder), 5, capsys)
