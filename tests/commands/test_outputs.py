"""No command replaces a file of the user: it is refused before anything is read or computed."""

import shutil

import pytest
from builders import contents, fill
from nearkin_command import run

from nearkin.run.folder import data_name, run_folder


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
        ("explore old.parquet photos.csv -o photos.csv --overwrite", 2),
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


def test_a_run_on_a_built_in_set_is_of_it_whatever_folder_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "digits", "1.png")
    assert data_name("digits") == "digits"
    assert data_name("./digits") == str(tmp_path / "digits")
