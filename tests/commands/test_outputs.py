"""No command replaces a file of the user: it is refused before anything is read or computed."""

import errno
import os
import shutil

import numpy as np
import pytest
import torch
from builders import contents, fill, pixels, write_files, write_network
from nearkin_command import run
from processes import small_files

from nearkin.commands.embed import embed_run
from nearkin.commands.sources import write_rows
from nearkin.errors import OutputError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.vectors import write_embeddings
from nearkin.run.folder import data_name, run_folder
from nearkin.run.sheets import save_sheet


@pytest.fixture
def photos(tmp_path):
    """Images, a table of their labels, and files that an earlier command may have written."""
    names = [f"{i}.png" for i in range(4)]
    data = fill(tmp_path / "photos", *names)
    (tmp_path / "photos.csv").write_text("path,label\n" + "".join(f"{n},cat\n" for n in names))
    for name in ("old.parquet", "old.csv", "old.html", "old.png"):
        (tmp_path / name).write_text("mine")
    return data


# No encoder and no run has this name: what is refused is refused before it is looked for.
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("embed NONE photos --labels photos.csv -o photos.npy", 2),
        ("embed NONE photos --labels photos.csv -o photos.npy --overwrite", 2),
        ("embed NONE photos.csv -o photos.npy", 2),
        ("audit photos.csv --encoder NONE -o photos.csv --overwrite", 2),
        ("audit --train old.csv --test photos.csv --encoder NONE -o photos.csv --overwrite", 2),
        ("audit photos --labels photos.csv --encoder NONE -o photos.csv --overwrite", 2),
        ("select NONE photos.csv --num 2 -o photos.csv --overwrite", 2),
        ("select NONE photos --num 2 --labeled photos.csv -o photos.csv --overwrite", 2),
        ("duplicates photos.csv -o photos.csv --overwrite", 2),
        ("duplicates photos.csv --apply ./photos.csv --overwrite", 2),
        ("explore old.parquet old.html -o old.html --overwrite", 2),
        ("neighbors NONE photos/0.png -o photos/0.png --overwrite", 2),
        ("export old.parquet --format atlas -o old.parquet --overwrite", 2),
        ("predict NONE photos.csv -o photos.csv --overwrite", 2),
        ("embed NONE photos -o photos.npy", 4),
        ("embed NONE photos -o old.parquet", 4),
        ("predict NONE photos -o old.csv", 4),
        ("select NONE photos --num 2 -o old.csv", 4),
        ("duplicates photos -o old.csv", 4),
        ("duplicates photos --page old.html", 4),
        ("explore NONE -o old.html", 4),
        ("compare NONE OTHER -o old.html", 4),
        ("neighbors NONE photos/0.png -o old.png", 4),
    ],
)
def test_what_is_there_stays_as_it_is(tmp_path, monkeypatch, photos, capsys, command, code):
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    assert run(*command.split()) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert ("replace it with --overwrite" if code == 4 else "which is read") in error
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("command", "code", "why"),
    [
        ("embed NONE photos -o old.csv/x.parquet", 4, "Not a directory"),
        ("embed NONE photos -o s3://bucket/x.parquet", 2, "-o s3://bucket/x.parquet is an add"),
        ("embed NONE photos -o s3://bucket/x --shard-size 2", 2, "-o s3://bucket/x is an address"),
        ("predict s3://me:pw@b/run photos", 2, "s3://b/run is an address; copy the run to this"),
        ("compare runs/a s3://b/run", 2, "s3://b/run is an address; copy the run to this machine"),
        ("train photos -o s3://bucket/run", 2, "-o s3://bucket/run is an address"),
        ("predict NONE photos -o new.csv --copy-to s3://b/x", 2, "--copy-to s3://b/x is an add"),
        ("discover photos --known a,b --copy-to s3://b/x", 2, "--copy-to s3://b/x is an address"),
        ("duplicates photos --page s3://bucket/x.html", 2, "--page s3://bucket/x.html is an add"),
        ("predict NONE photos -o old.csv/x.csv", 4, "Not a directory"),
        ("select NONE photos --num 2 -o old.csv/x.csv", 4, "Not a directory"),
        ("duplicates photos --page old.csv/deep/x.html", 4, "Not a directory"),
        ("duplicates photos --apply old.csv/kept", 4, "Not a directory"),
        ("audit photos --encoder NONE -o old.csv/x.csv", 4, "Not a directory"),
        ("compare NONE OTHER -o old.csv/x.html", 4, "Not a directory"),
        ("explore NONE -o old.csv/x.html", 4, "Not a directory"),
        ("export NONE -o old.csv/x.onnx", 4, "Not a directory"),
        ("neighbors NONE photos/0.png -o old.csv/x.png", 4, "Not a directory"),
        ("predict NONE photos -o folder.csv --overwrite", 4, "is a folder"),
        ("embed NONE photos -o folder.npz --overwrite", 4, "is a folder"),
        ("export NONE -o folder.onnx --overwrite", 4, "is a folder"),
        ("predict NONE photos -o x.parquet", 2, "ends in .csv"),
        ("embed NONE photos -o x.PARQUET", 2, "cannot write embeddings as x.PARQUET"),
        ("explore NONE -o x.pdf", 2, "ends in .html"),
        ("compare NONE OTHER -o x.csv", 2, "ends in .html"),
        ("neighbors NONE photos/0.png -o x.txt", 2, "ends in .png"),
    ],
)
def test_what_cannot_be_written_is_refused_first(
    tmp_path, monkeypatch, photos, refusal, command, code, why
):
    monkeypatch.chdir(tmp_path)
    for name in ("folder.csv", "folder.npz", "folder.onnx"):
        (tmp_path / name).mkdir()
    before = contents(tmp_path)
    assert why in refusal(code, *command.split())
    assert contents(tmp_path) == before


def test_the_folder_of_an_output_is_made(tmp_path, monkeypatch, photos):
    monkeypatch.chdir(tmp_path)
    options = ("-o", "new/a/x.csv", "--page", "new/b/x.html", "--apply", "new/c/x.csv")
    assert run("duplicates", "photos", *options) == 0
    assert sorted(contents(tmp_path / "new")) == ["a/x.csv", "b/x.html", "c/x.csv"]


def test_files_of_a_run_are_no_outputs(tmp_path, monkeypatch, trained_run, photos, refusal):
    """Also where the run is not read, by another path, and of its plots; others may be."""
    monkeypatch.chdir(tmp_path)
    out = shutil.copytree(trained_run, tmp_path / "run")
    (tmp_path / "link").symlink_to(out)
    (out / "mine.csv").write_text("mine")
    before = contents(out)
    for command in (
        "predict run photos -o run/images.csv",
        "select run --num 1 -o ./photos/../run/metrics.csv",
        "duplicates photos -o link/images.csv",
        "embed run photos -o run/embeddings.parquet",
        "embed run/encoder.safetensors photos -o run/map.npz",
        "neighbors run photos/0.png -o run/plots/augmentations.png",
        "explore run -o run/report.html",
        "compare run link -o run/report.html",
    ):
        for more in ((), ("--overwrite",)):
            line = refusal(2, *command.split(), *more)
            assert "is a file of the run" in line
    assert contents(out) == before
    assert run("duplicates", "photos", "-o", "run/mine.csv", "--overwrite") == 0
    (out / "config.toml").unlink()  # other folders may have files of these names
    assert run("duplicates", "photos", "-o", "run/images.csv", "--overwrite") == 0


def _write_any(path):
    """Write more than 4 KiB by the writer of that suffix."""
    rng = np.random.default_rng(0)
    if path.suffix == ".csv":
        write_rows(path, ("path", "label"), [(f"{i}.png", "cat") for i in range(1000)])
    elif path.suffix == ".png":
        save_sheet([torch.from_numpy(rng.random((2, 3, 64, 64)))], path)
    else:
        paths = [f"{i}.png" for i in range(40)]
        vectors = rng.normal(size=(40, 64)).astype(np.float32)
        write_embeddings(path, Embeddings(vectors, np.zeros(40, np.int64), paths=paths))


@pytest.mark.parametrize("name", ["old.parquet", "old.npz", "old.npy", "old.csv", "old.png"])
def test_what_does_not_fit_leaves_what_is_there(tmp_path, photos, name):
    path = tmp_path / name
    _write_any(path)
    before = contents(tmp_path)
    with small_files(4096), pytest.raises((OutputError, OSError)):
        _write_any(path)
    assert contents(tmp_path) == before
    _write_any(path)
    assert contents(tmp_path).keys() == before.keys()


def test_the_table_beside_features_is_not_replaced_before_they_are_on_the_disk(
    tmp_path, monkeypatch
):
    _write_any(tmp_path / "old.npy")
    (tmp_path / "old.csv").write_text("of the old features")
    before, fsync = contents(tmp_path), os.fsync

    def full(number):
        if os.fstat(number).st_ino in {f.stat().st_ino for f in tmp_path.glob(".old.npy.*")}:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        fsync(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="quota"):
        _write_any(tmp_path / "old.npy")
    assert contents(tmp_path) == before


def test_a_table_of_the_run_folder_that_a_command_reads_is_not_overwritten(
    tmp_path, trained_run, photos, refusal
):
    """What the user has put there stays, so that it may be read."""
    out = shutil.copytree(trained_run, tmp_path / "run")
    (out / "mine.csv").write_text((tmp_path / "photos.csv").read_text())
    shutil.copy(tmp_path / "photos.csv", out / "to_label.csv")
    before = contents(out)
    for option in ("--labels", "--labeled"):
        command = ["classify", trained_run, photos, option, out / "to_label.csv", "-o", out]
        line = refusal(2, *command, "--overwrite", "-q")
        assert f"--overwrite would remove {out}/to_label.csv; choose another -o" in line
    line = refusal(2, "embed", trained_run, out / "to_label.csv", "-o", out, "--overwrite", "-q")
    assert f"--overwrite would remove {out}/to_label.csv" in line
    assert contents(out) == before
    mine = ["classify", trained_run, photos, "--labels", out / "mine.csv", "-o", out]
    assert "'cat'" in refusal(3, *mine, "--overwrite", "-q")  # one class only, after it was read


def test_a_folder_of_images_is_no_run_to_resume(tmp_path, photos, refusal):
    before = contents(photos)
    line = refusal(4, "train", "digits", "-o", photos, "--resume", "-q")
    assert f"{photos} is no run, so --resume spares it; empty it or choose another -o" in line
    assert contents(photos) == before


def test_the_config_and_data_of_another_program_are_not_overwritten(tmp_path, refusal):
    mine = {
        "config.toml": b"[server]\nport = 80\n",
        "data.json": b'{"rows": 3}',
        "metrics.csv": b"",
    }
    folder = write_files(tmp_path / "mine", mine)
    line = refusal(4, "train", "digits", "-o", folder, "--overwrite", "-q")
    assert f"{folder} is no run, so --overwrite spares it; empty it or choose another -o" in line
    assert contents(folder) == mine


def test_a_run_whose_name_looks_like_an_encoder_of_a_file_is_spared(
    tmp_path, trained_run, digits_file, refusal
):
    out = shutil.copytree(trained_run, tmp_path / "me@home")
    before = contents(out)
    line = refusal(2, "embed", out, digits_file, "-o", out, "--overwrite", "-q")
    assert f"--overwrite would remove {out}; choose another -o" in line
    assert contents(out) == before


def test_a_demo_that_is_resumed_spares_what_is_no_demo(tmp_path, refusal):
    folder = fill(tmp_path / "demo" / "train", "mine.png")
    line = refusal(4, "demo", "-o", tmp_path / "demo", "--resume", "-q")
    assert f"{folder} is no run, so --resume spares it" in line


def test_a_run_folder_is_called_like_the_folder_of_its_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data, name in (("photos.v1.2", "photos.v1.2"), (".cache", "cache"), ("a.tar.gz", "a")):
        if not data.endswith(".gz"):
            (tmp_path / data).mkdir()
        assert (
            run_folder(None, tmp_path / data, "simclr", again=False).path.name == f"{name}-simclr"
        )


def test_files_are_replaced_on_request(tmp_path, monkeypatch, photos):
    monkeypatch.chdir(tmp_path)
    assert run("duplicates", "photos", "-o", "old.csv", "--page", "old.html", "--overwrite") == 0
    assert (tmp_path / "old.csv").read_text().startswith("path,")
    assert "<html" in (tmp_path / "old.html").read_text()


def test_a_run_of_arrays_is_replaced_by_one_of_the_same_images_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    encoder = write_network(tmp_path / "encoder.safetensors")
    images = pixels(8, 16)
    parts = images[:4], images[4:], images[:3], list(images[4:])
    runs = [
        embed_run(encoder, part, overwrite=True, report=False, workers=0, verbose=False).path.name
        for part in parts
    ]
    assert runs == [runs[0], f"{runs[0]}-2"] * 2


def test_a_run_on_a_built_in_set_is_of_it_whatever_folder_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "digits", "1.png")
    assert data_name("digits") == "digits"
    assert data_name("./digits") == str(tmp_path / "digits")
