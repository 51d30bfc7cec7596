"""A run goes on with the images it was started with, or says which have changed."""

import os
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import kills
import numpy as np
import pytest
from builders import as_bytes, encoded, write_files
from PIL import Image

from nearkin.commands.embed import embed_run
from nearkin.commands.evaluate import evaluate
from nearkin.commands.train import train
from nearkin.config import ClassifyConfig, EmbedConfig, TrainConfig
from nearkin.data.opening import open_images
from nearkin.errors import CheckpointError, DataError
from nearkin.run.data import hold_out, note_data, open_split, stored_split
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv

CONFIG = TrainConfig(
    backbone="tiny", image_size=16, epochs=1, batch_size=8, workers=0, report=False
)
TYPED = ["--backbone", "tiny", "--image-size", "16", "--epochs", "1", "--batch-size", "8"]
TYPED += ["--workers", "0", "-q"]
ODD_NAME = os.fsdecode(b"\xff.bmp")


def bmp(seed, side=12):
    return encoded(seed, (side, side), "BMP")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Twenty images, one of a name that is not UTF-8, and a run of them."""
    root = tmp_path_factory.mktemp("same")
    names = [*(f"{number:02d}.bmp" for number in range(19)), ODD_NAME]
    files = {name: bmp(seed) for seed, name in enumerate(names)}
    train(write_files(root / "data", files), CONFIG, output=root / "run")
    return root


@pytest.fixture
def run(trained, tmp_path):
    """A copy in which anything may change; a run is of wherever its data lie."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def resume(run):
    train(run / "data", CONFIG, output=run / "run", resume=True)
    return (run / "run" / "train.log").read_text()


def move_to_parts(data):
    (data / "test").mkdir()
    (data / "train").mkdir()
    for path in sorted(data.glob("*.bmp")):
        path.rename(data / ("test" if path.name < "05" else "train") / path.name)


def rename(data):
    (data / "07.bmp").rename(data / "zz.bmp")


CHANGES = {
    r"1 added \('new\.bmp'\)": lambda data: write_files(data, {"new.bmp": bmp(99)}),
    r"1 removed \('07\.bmp'\)": lambda data: (data / "07.bmp").unlink(),
    r"1 added \('zz\.bmp'\), 1 removed \('07\.bmp'\)": rename,
    r"1 of other contents \('03\.bmp'\)": lambda data: write_files(data, {"03.bmp": bmp(3, 14)}),
    r"1 of other contents \('04\.bmp'\)": lambda data: write_files(data, {"04.bmp": bmp(99)}),
    r"20 added \('test/00\.bmp'\), 20 removed": move_to_parts,
}
"""What is done to the data, by what is said of it."""


def test_what_has_changed_is_named(trained, tmp_path):
    for number, (says, change) in enumerate(CHANGES.items()):
        run = shutil.copytree(trained, tmp_path / str(number))
        change(run / "data")
        with pytest.raises(CheckpointError, match=f"{says}.*; bring them back") as error:
            resume(run)
        assert "data have changed " in str(error.value)
        assert error.value.exit_code == 5


def test_times_and_the_order_of_a_folder_are_no_change(run):
    for path in sorted((run / "data").iterdir(), reverse=True):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        os.utime(path, (1, 1))
    assert "already complete" in resume(run)


def test_what_a_run_was_started_with_is_noted_by_any_name(run):
    noted = run / "run" / "images.csv"
    assert "\udcff.bmp" in {row["path"] for row in read_csv(noted)}
    (run / "data" / "07.bmp").unlink()
    noted.write_text("path,bytes\na.bmp,many\n")
    with pytest.raises(CheckpointError, match=r"images\.csv cannot be used \('content'\)"):
        resume(run)
    noted.unlink()
    for command in (resume, lambda run: evaluate(run / "run")):
        with pytest.raises(CheckpointError, match=r"cannot be used \(.*No such file.*put it back"):
            command(run)


def test_without_its_record_of_the_data_a_run_does_not_go_on(run):
    (run / "run" / "data.json").unlink()
    write_files(run / "data", {"new.bmp": bmp(99)})
    with pytest.raises(CheckpointError, match=r"has a run but no data\.json.*bring it back"):
        resume(run)


def test_an_overwriting_that_is_killed_leaves_no_new_run(run):
    """It goes on with the data of the run that it was to remove, or begins again."""
    typed = ["train", str(run / "data"), "-o", str(run / "run"), "--overwrite"]
    aim = kills.Aim("nearkin.commands.train.clear", "shutil.rmtree", "before")
    killed = kills.start([*typed, *TYPED], lambda: kills.set_up(aim, "simclr", 1))
    assert kills.finish(killed) == -signal.SIGKILL
    assert not (run / "run" / "config.toml").exists()
    write_files(run / "data", {"new.bmp": bmp(99)})
    with pytest.raises(CheckpointError, match=r"1 added \('new\.bmp'\)"):
        resume(run)
    train(run / "data", CONFIG, output=run / "run", overwrite=True)


def test_a_file_that_can_be_read_by_now_stays_out_of_a_run_that_goes_on(tmp_path):
    files = {f"{number:02d}.bmp": bmp(number) for number in range(20)}
    data = write_files(tmp_path / "data", files | {"late.bmp": b"no image"})
    train(data, CONFIG, output=tmp_path / "run")
    write_files(data, {"late.bmp": bmp(20)})
    said = resume(tmp_path)
    assert "already complete" in said
    assert "1 image that could not be read when the run was started, such as 'late.bmp'" in said
    assert [row["path"] for row in read_csv(tmp_path / "run" / "bad_files.csv")] == ["late.bmp"]
    write_files(data, {"new.bmp": bmp(99)})
    with pytest.raises(
        CheckpointError, match=r"changed since the run was started: 1 added \('new"
    ):
        resume(tmp_path)


def parts_of(split):
    return dict(zip(split.images.names, split.splits.tolist(), strict=True))


def nearly(path):
    """A near-duplicate of an image: a shade lighter."""
    with Image.open(path) as image:
        lighter = np.asarray(image).astype(int) // 2 * 2 + 1
    return as_bytes(Image.fromarray(lighter.astype(np.uint8)), "PNG")


def test_images_keep_their_side_whatever_comes_and_whatever_they_are_called(run):
    """Near-duplicates that come first by name would otherwise decide for their whole group."""
    data, folder = run / "data", RunFolder(run / "run")
    stored = stored_split(folder)
    before = parts_of(open_split(data, CONFIG))
    held_out = {name for name, part in before.items() if part == "test"}
    assert 0 < len(held_out) < 10
    assert {*np.array(stored.names)[stored.held_out].tolist()} == held_out
    copies = {f"a{name}.png": nearly(data / name) for name in before if name != ODD_NAME}
    write_files(data, copies | {f"new/{number}.bmp": bmp(100 + number) for number in range(30)})
    after = parts_of(open_split(data, CONFIG, resumed=folder))
    assert {name: after[name] for name in before} == before
    assert all(after[name] == before[name[1:-4]] for name in copies)
    assert {part for name, part in after.items() if name.startswith("new/")} == {"train", "test"}
    for name in before:
        (data / name).rename(data / f"renamed-{len(name)}-{name}")
    renamed = parts_of(open_split(data, CONFIG, resumed=folder))
    assert {name.split("-", 2)[2]: p for name, p in renamed.items() if "renamed" in name} == before


def test_measures_of_changed_images_say_so_and_are_not_stored(tmp_path, log):
    files = {f"{number:02d}.bmp": bmp(number) for number in range(20)}
    data, out = write_files(tmp_path / "data", files), tmp_path / "run"
    train(data, CONFIG, output=out)
    evaluate(out, protocol=["labelfree"], verbose=log)
    (out / "evaluation.json").unlink()  # it was stored
    assert not any("not the images" in text for text in log.texts)
    write_files(data, {"00.bmp": bmp(50), "zz.bmp": bmp(51)})
    evaluate(out, protocol=["labelfree"], verbose=log)
    (said,) = [text for text in log.texts if "not the images" in text]
    assert f"warning: these are not the images of {out}: 1 added ('zz.bmp')" in said
    assert "1 of other contents ('00.bmp')" in said
    assert not (out / "evaluation.json").exists()
    other = np.random.default_rng(0).integers(0, 256, (20, 12, 12, 3), np.uint8)
    evaluate(out, other, protocol=["labelfree"], verbose=log)
    assert any("none of them is the same" in text for text in log.texts)


def test_what_an_encoder_was_trained_on_is_not_scored_whatever_goes_on_with_it(run):
    """Another seed would hold other images out, and no setting names the run but its encoder."""
    sides = stored_split(RunFolder(run / "run"))
    embed_run(run / "run", run / "data", output=run / "embedded", seed=5, val=0.3)
    more = {"encoder": run / "run", "seed": 5, "output": run / "continued"}
    train(run / "data", CONFIG, **more)
    for name in ("embedded", "continued"):
        stored = stored_split(RunFolder(run / name))
        assert stored is not None
        assert stored.held_out.tolist() == sides.held_out.tolist(), name
    train(run / "data", CONFIG, **{**more, "output": run / "all"}, val=0.0)
    assert not stored_split(RunFolder(run / "all")).held_out.any()  # nothing is scored


def divided(run, *test_names):
    """A table that names these images of a run to be scored, and all others to train on."""
    table, names = run / "split.csv", stored_split(RunFolder(run / "run")).names
    cells = ((n, n in test_names) for n in names if n != ODD_NAME)
    lines = [f"data/{n},{'ab'[int(n[1]) % 2]},{'test' if test else 'train'}" for n, test in cells]
    table.write_text("\n".join(["path,label,split", *lines]) + "\n")
    return table


def test_a_test_part_that_the_data_name_is_scored_less_what_the_encoder_was_trained_on(
    run, tmp_path, log
):
    """Nothing that a run of an encoder from elsewhere has of the images was trained on."""
    noted = stored_split(RunFolder(run / "run"))
    held_out = sorted(np.array(noted.names)[noted.held_out].tolist())
    seen = sorted({*noted.names} - {*held_out, ODD_NAME})[:5]
    table, embedded = divided(run, *held_out, *seen), run / "embedded"
    embed_run(run / "run", table, output=embedded, verbose=log)
    said = (
        f"substituted: 5 of {5 + len(held_out)} test images, which an earlier run has trained on"
    )
    assert any(text.startswith(said) for text in log.texts)
    embed_run(run / "run", table, output=embedded, resume=True)
    weights = shutil.copy(run / "run/encoder.safetensors", run / "weights.safetensors")
    elsewhere = embed_run(weights, run / "data", output=run / "elsewhere").folder
    for encoder in (run / "run", embedded):
        split = open_split(table, EmbedConfig(encoder=str(encoder)))
        scored = {name.removeprefix("data/") for name in split.test.names}
        assert scored == {*held_out}
        assert len(split.images) == 19
    own = open_split(table, EmbedConfig(encoder=str(elsewhere.path)), resumed=elsewhere)
    assert len(own.test) == 5 + len(held_out)
    assert not own.images.notes
    all_seen = open_images(str(divided(run, *seen)))
    for settings in (ClassifyConfig(encoder=str(run / "run")), CONFIG):
        if settings is CONFIG:
            settings = replace(CONFIG, encoder=str(run / "run"), val=0.0)
        with pytest.raises(DataError, match=r"trained on all test images.*; give other test"):
            hold_out(all_seen, settings)


def test_what_the_runs_of_encoder_and_teacher_were_trained_on_is_not_scored(tmp_path):
    """Nor what a run was trained on that one of them has started from."""
    files = {f"{number:03d}.bmp": bmp(number) for number in range(120)}
    images = open_images(str(write_files(tmp_path / "data", files)))
    whole, trained = TrainConfig(val=0.3), set[str]()
    given = dict[str, str]()
    for number, role in enumerate(("", "encoder", "teacher")):
        folder = RunFolder(tmp_path / str(number))
        folder.path.mkdir()
        before = {"encoder": given["encoder"]} if role == "encoder" else {}
        config = replace(whole, seed=number, **before)
        split = hold_out(images.subset(np.arange(number, 120, 3)), config)
        note_data(folder, split)
        folder.write_settings(config, "data")
        given[role or "encoder"] = str(folder.path)
        trained |= {*split.train.names}
    scored = {*hold_out(images, replace(whole, seed=9, **given)).test.names}
    assert scored
    assert not scored & trained


def by_name(pixels):
    """Arrays by name, as a user's own source gives them."""
    images = {f"{number:03}": each for number, each in enumerate(pixels)}
    return SimpleNamespace(names=[*images], read=images.get)


def below_black(seed, count):
    """Images that are black above, as X-rays are: of more than the bytes that tell files apart."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 160, 160, 3), np.uint8)
    pixels[:, :140] = 0
    return pixels


@pytest.mark.parametrize("source", [np.asarray, by_name])
def test_pixels_in_memory_are_told_apart_by_all_of_them(tmp_path, source):
    folder = RunFolder(tmp_path)
    note_data(folder, open_split(source(below_black(0, 20)), CONFIG))
    new = source(below_black(1, 20))
    split = open_split(new, replace(CONFIG, encoder=str(folder.path), val=0.3))
    assert len({*split.images.contents.tolist()}) == 20
    assert 0 < len(split.test) < 20  # none of them was trained on
    assert note_data(folder, open_split(source(below_black(0, 20)), CONFIG)) == []
    with pytest.raises(CheckpointError, match="none of them is the same"):
        note_data(folder, open_split(new, CONFIG))
