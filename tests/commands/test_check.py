"""`nearkin check`: what it says of images before any training."""

import json
import tomllib
from importlib import import_module

import numpy as np
import pytest
from builders import fill
from nearkin_command import run

import nearkin
from nearkin.data import split


def test_what_was_decided_about_the_data_is_one_block_what_was_left_out_first(tmp_path, capsys):
    names = [f"{name}/{i}.png" for name in ("Cat", "cat") for i in range(4)]
    data = fill(tmp_path / "data", *names)
    table = tmp_path / "labels.csv"
    table.write_text("path,label\n" + "".join(f"{n},{n[:3]}\n" for n in [*names, "gone.png"]))
    assert run("check", data, "--labels", table) == 0
    lines = capsys.readouterr().out.splitlines()
    lines = [line for line in lines if "case alone" in line or "rows" in line]
    assert lines == [
        f"notes       left out: 1 of 9 rows of {table}, which belong to no usable image, "
        "such as 'gone.png'",
        "            guessed: 2 names of classes that differ by case alone are classes of their own, "
        "such as 'Cat', 'cat'",
    ]
    assert run("check", data, "--labels", table, "--json") == 0
    left_out, guessed = json.loads(capsys.readouterr().out)["notes"]
    assert (left_out["decision"], left_out["count"]) == ("left out", 1)
    assert (guessed["decision"], guessed["examples"]) == ("guessed", ["Cat", "cat"])


def test_the_parts_that_folders_name_are_said_with_what_leaks_from_one_to_the_other(
    tmp_path, capsys
):
    sides = {"Training": 8, "Testing": 4}
    names = [f"{side}/{i % 2}/{i}.png" for side, number in sides.items() for i in range(number)]
    data = fill(tmp_path / "data", *names, size=(40, 40))
    (data / "Testing/0/0.png").write_bytes((data / "Training/0/2.png").read_bytes())
    assert run("check", data) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "labels      2 classes of 6 images, for scoring only" in lines
    assert "parts       8 to train on, 4 to score, by the data's own names" in lines
    leak = "            1 of 4 test images have a near-duplicate among the training images"
    assert leak in lines
    assert any(" batch 8 (global)," in line for line in lines)


def test_settings_are_proposed_for_the_images_that_a_training_trains_on(tmp_path, capsys):
    """Those to score count neither for the batch nor for the length."""
    data = fill(tmp_path / "data", *(f"{n}.png" for n in range(30)))
    assert run("train", data, "--epochs", 1, "-o", tmp_path / "run", "--backbone", "tiny") == 0
    noted = json.loads((tmp_path / "run/data.json").read_text())
    batch = tomllib.loads((tmp_path / "run/config.toml").read_text())["batch_size"]
    assert batch == noted["train"] < 30
    capsys.readouterr()
    assert run("check", data) == 0
    text = capsys.readouterr().out
    parts = f"{noted['train']} to train on, {noted['test']} to score, as by --val 0.1"
    assert f"parts       {parts}\n" in text
    assert f" batch {batch} (global)," in text
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    assert f", {3 * checkpoint.stat().st_size / 1e6:.0f} MB of disk" in text


def test_images_that_cannot_be_divided_are_checked_all_the_same(tmp_path, capsys):
    assert run("check", fill(tmp_path, "0.png")) == 0
    text = capsys.readouterr().out
    assert "parts       the images cannot be divided\n" in text
    assert "proposal    none: 1 image cannot be divided in two parts" in text


def _colored(kind: int, rng: np.random.Generator) -> np.ndarray:
    """Noise about a red or a green that is the class."""
    return np.array([[160, 60, 60], [60, 160, 60]][kind]) + rng.normal(0, 20, (32, 32, 3))


def _turned(kind: int, rng: np.random.Generator) -> np.ndarray:
    """A bright triangle whose right angle is left or right: each mirrors the other."""
    lower = np.tri(32) if kind else np.tri(32)[:, ::-1]
    gray = 160 * lower + 60 * rng.random((4, 4)).repeat(8, axis=0).repeat(8, axis=1)
    return gray[..., None] * [1.0, 0.8, 0.6]


@pytest.mark.parametrize(
    ("drawn", "said"),
    [(_colored, "mean color alone predicts 100%"), (_turned, "but 0% of mirrored ones")],
)
def test_augmentations_that_remove_what_tells_the_classes_are_said(drawn, said):
    rng = np.random.default_rng(0)
    labels = rng.integers(2, size=80)
    pixels = np.stack([drawn(kind, rng) for kind in labels]).clip(0, 255).astype(np.uint8)
    (warning,) = _of_augmentation(pixels, labels)
    assert said in warning
    assert "augmentation simsiam_cifar" in warning
    # Gray images are augmented as characters are: in neither way.
    assert not _of_augmentation(pixels[..., 0], labels)


def test_of_too_many_images_no_duplicates_are_searched(tmp_path, capsys, monkeypatch):
    data = fill(tmp_path / "data", *(f"{i}.png" for i in range(24)))
    monkeypatch.setattr(split, "MAX_COMPARED", 23)
    assert run("check", data) == 0
    assert "\nduplicates  not searched\n" in capsys.readouterr().out
    assert run("check", data, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["exact_duplicates"], answer["near_duplicates"]) == (None, None)
    assert answer["notes"][0]["text"].startswith("the search for duplicates")


def _of_augmentation(pixels: np.ndarray, labels: np.ndarray) -> list[str]:
    warnings = nearkin.check((pixels, labels), verbose=False).warnings
    return [each for each in warnings if "augmentation" in each]


def out_of_memory(*_, **__):
    raise MemoryError


def test_what_was_found_is_shown_where_memory_runs_out_in_a_training(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(import_module("nearkin.commands.check"), "build", out_of_memory)
    assert run("check", fill(tmp_path, *(f"{n}.png" for n in range(8)))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "images    8 (8 PNG)" in lines
    assert any(line.startswith("proposal    none: out of memory; ") for line in lines)


@pytest.mark.parametrize(
    ("command", "function"),
    [("check", "open_images"), ("duplicates", "open_images"), ("evaluate", "choose_device")],
)
def test_memory_that_runs_out_before_anything_is_found_is_no_bug(
    command, function, monkeypatch, refusal
):
    monkeypatch.setattr(import_module(f"nearkin.commands.{command}"), function, out_of_memory)
    assert "out of memory; " in refusal(8, command, "digits")
