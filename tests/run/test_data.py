"""What a run folder says of images: which another run was trained on, its share, unreadable ones."""

from dataclasses import replace

import numpy as np
import pytest
from builders import contents, fill, pixels, write_files, write_network

from nearkin.commands.train import train
from nearkin.config import ClassifyConfig, EmbedConfig, TrainConfig
from nearkin.data.opening import open_images
from nearkin.errors import CheckpointError, DataError, UsageError
from nearkin.run.data import held_share, hold_out, note_data, origin_of
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv


def noted(path, images, config, data="arrays"):
    """The folder of a run, as far as it says what the run was trained on."""
    folder = RunFolder(path)
    folder.path.mkdir()
    split = hold_out(images, config)
    note_data(folder, split)
    folder.write_settings(config, data)
    return folder, {*split.test.names}


@pytest.fixture
def started(tmp_path):
    """Images, a run of them, one that started from it, and what the first of them has held out.

    The second run was trained on all images, which no score says anything of.
    """
    images, config = open_images(pixels(60)), TrainConfig(val=0.3)
    first, held_out = noted(tmp_path / "first", images, config)
    write_network(first.encoder)
    given = replace(config, encoder=str(first.path), val=0.0)
    second, _ = noted(tmp_path / "second", images, given)
    return images, first, second, held_out


@pytest.mark.parametrize("kept", ["start", "teacher"])
def test_a_copy_of_a_start_or_teacher_was_trained_on_what_its_own_run_was(started, kept):
    """As a verdict advises it; another seed would hold other images out."""
    images, first, second, held_out = started
    copy = write_network(getattr(second, kept))
    settings = second.settings()[0]
    if kept == "teacher":
        settings = replace(settings, encoder="", method="seed", teacher=str(first.encoder))
        second.write_settings(settings, "arrays")
    assert origin_of(str(copy)) == first.path.resolve()
    again = hold_out(images, EmbedConfig(encoder=str(copy), seed=7))
    assert {*again.test.names} == held_out


def test_the_start_of_a_run_that_is_gone_was_trained_on_what_the_run_of_the_copy_was(started):
    _, first, second, _ = started
    copy, _ = write_network(second.start), first.path.rename(first.path.with_name("moved"))
    assert origin_of(str(copy)) == second.path.resolve()


def test_a_note_says_that_a_run_is_gone_which_an_encoder_started_from(started, tmp_path):
    """Where its own images are measured that is nothing new; a run that goes on keeps the note."""
    images, first, second, _ = started
    others, config = open_images(pixels(60, seed=9)), ClassifyConfig(encoder=str(second.path))
    third = RunFolder(tmp_path / "third")
    third.path.mkdir()
    assert not hold_out(others, config).images.notes
    moved = first.path.rename(tmp_path / "moved")
    split = hold_out(others, config)
    (note,) = split.images.notes
    assert f"a new split: {first.path}, which the encoder was loaded from, is gone" in note.text
    settings = replace(second.settings()[0], val=0.1)  # as `evaluate` has them
    assert hold_out(others, settings, resumed=second).images.notes == (note,)
    assert not hold_out(images, settings, resumed=second).images.notes
    note_data(third, split)
    third.write_settings(config, "arrays")
    moved.rename(first.path)
    assert hold_out(others, config, resumed=third).images.notes == (note,)


def test_the_start_of_a_library_was_trained_on_none_of_the_images(started, tmp_path):
    _, _, second, _ = started
    copy = write_network(second.start)
    elsewhere = write_network(tmp_path / "elsewhere" / "weights.safetensors")
    for encoder in ("dinov2-small", "timm:resnet18.a1_in1k", str(elsewhere)):
        second.write_settings(replace(second.settings()[0], encoder=encoder), "arrays")
        assert origin_of(str(copy)) is None, encoder


def test_a_start_that_names_itself_ends(started):
    _, _, second, _ = started
    copy = write_network(second.start)
    second.write_settings(replace(second.settings()[0], encoder=str(copy)), "arrays")
    assert origin_of(str(copy)) == second.path.resolve()


def test_the_share_of_a_run_is_that_of_the_same_arrays_only(tmp_path):
    """All Python objects have one name in files."""
    own, others = pixels(60), pixels(60, seed=9)
    run, _ = noted(tmp_path / "run", open_images(own), TrainConfig(val=0.2))
    given = ClassifyConfig(encoder=str(run.path))
    labels = np.arange(60) % 2
    assert held_share((own, labels), given) == held_share(own[:50], given) == 0.2
    assert held_share((others, labels), given) == 0.1
    assert held_share((others, labels), replace(given, val=0.3)) == 0.3
    with pytest.raises(UsageError, match=r"was made with val 0\.2 of the same images"):
        held_share((own, labels), replace(given, val=0.3))


SMALL = TrainConfig(
    backbone="tiny", image_size=16, epochs=1, batch_size=8, workers=0, report=False
)


def test_the_unreadable_images_of_a_refused_attempt_are_not_those_of_the_run(tmp_path):
    data, out = fill(tmp_path / "data", *(f"{n:02d}.png" for n in range(20))), tmp_path / "run"
    broken = {f"broken-{number}.png": b"no image" for number in range(9)}
    write_files(data, broken)
    with pytest.raises(DataError, match="9 of 29 images are unreadable"):
        train(data, SMALL, output=out)
    assert {row["path"] for row in read_csv(out / "bad_files.csv")} == {*broken}
    for name in broken:
        (data / name).unlink()
    train(data, SMALL, output=out)
    assert not (out / "bad_files.csv").exists()


def test_the_list_of_a_run_is_that_of_its_own_images_until_another_takes_its_place(tmp_path):
    data, out = fill(tmp_path / "data", *(f"{n:02d}.png" for n in range(20))), tmp_path / "run"
    others = fill(tmp_path / "others", *(f"{n:02d}.png" for n in range(21)))
    write_files(data, {"broken.png": b"no image"})
    train(data, SMALL, output=out)
    before = contents(out)
    write_files(others, {"other.png": b"no image"})
    with pytest.raises(UsageError, match="batch_size"):
        train(others, replace(SMALL, batch_size=64), output=out, overwrite=True)
    for wrong in (
        replace(SMALL, backbone="resnt18"),
        replace(SMALL, method="seed", teacher="dinov2-smal"),
    ):
        with pytest.raises(UsageError):
            train(others, wrong, output=out, overwrite=True)
    with pytest.raises(CheckpointError, match="the data have changed"):
        train(others, SMALL, output=out, resume=True)
    broken = {f"broken-{number}.png": b"no image" for number in range(8)}
    write_files(others, broken)
    with pytest.raises(DataError, match="9 of 30 images are unreadable"):
        train(others, SMALL, output=out, overwrite=True)
    after = contents(out)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed - {".nearkin-run"} == {"train.log"}  # the other one has the second of the start
    assert after.keys() == before.keys()
    for name in broken:
        (others / name).unlink()
    train(others, SMALL, output=out, overwrite=True)
    assert [row["path"] for row in read_csv(out / "bad_files.csv")] == ["other.png"]


def test_a_finished_run_keeps_its_list_of_images_that_only_decoding_found(tmp_path):
    """A resumed one opens the images, and does not decode them again."""
    data, out = fill(tmp_path / "data", *(f"{n:02d}.png" for n in range(20))), tmp_path / "run"
    path = data / "03.png"
    path.write_bytes(path.read_bytes()[:-40])
    for resume in (False, True):
        train(data, SMALL, output=out, resume=resume)
        assert [row["path"] for row in read_csv(out / "bad_files.csv")] == ["03.png"]
