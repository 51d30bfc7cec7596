"""The command line as people use it: real files, real runs, real exit codes."""

import importlib
import json
import shutil
from pathlib import Path

import builders
import pytest
from nearkin_command import run
from PIL import Image
from safetensors.torch import load_file

from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.methods import METHODS
from nearkin.run.options import checked_options
from nearkin.toml import read_toml, recipe_files, settings_file


def save_images(folder, count, seed=0):
    return builders.fill(folder, *(f"{n:03d}.png" for n in range(count)), seed=seed, size=(24, 20))


SMALL = ["--backbone", "tiny", "--image-size", "16", "--batch-size", "8", "--device", "cpu"]
QUICK = [*SMALL, "--evaluate-every", "0", "--val", "0"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("flat") / "images", 40)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, images):
    """A finished run on flat, unlabeled images; read, never written."""
    out = tmp_path_factory.mktemp("runs") / "first"
    assert run("train", images, "--epochs", 2, *SMALL, "--report", "-o", out, "-q") == 0
    return out


def test_a_run_leaves_every_file_that_the_documentation_names(finished):
    assert {path.name for path in finished.iterdir()} >= {
        "checkpoints", "config.toml", "embeddings.parquet", "encoder.safetensors",
        "metrics.csv", "plots", "projector.safetensors", "summary.json", "train.log",
    }  # fmt: skip
    assert {path.name for path in (finished / "plots").iterdir()} == {"augmentations.png"}


def test_the_configuration_of_a_run_repeats_it_to_the_bit(finished, tmp_path):
    again = tmp_path / "again"
    assert run("train", "--config", str(finished / "config.toml"), "-o", str(again), "-q") == 0
    for name in ("metrics.csv", "encoder.safetensors"):
        assert (again / name).read_bytes() == (finished / name).read_bytes()


def test_a_finished_run_is_resumed_without_a_change_and_by_its_own_settings_only(
    finished, images, capsys, refusal
):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*.safetensors")}
    arguments = ["train", images, "--batch-size", 8, "-o", finished, "--resume"]
    assert run(*arguments, "--epochs", 2) == 0
    assert "already complete" in capsys.readouterr().err
    assert "--epochs 2 became 9" in refusal(2, *arguments, "--epochs", 9)
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*.safetensors")}


def test_a_folder_that_is_not_empty_is_refused_and_both_ways_out_are_named(
    finished, images, tmp_path, refusal
):
    line = refusal(4, "train", images, "-o", finished)
    assert "--resume" in line
    assert "--overwrite" in line
    (tmp_path / "metrics.csv").write_text("mine")  # --overwrite is for runs only
    assert "is no run" in refusal(4, "train", images, "-o", tmp_path, "--overwrite")
    assert (tmp_path / "metrics.csv").read_text() == "mine"


def test_overwriting_replaces_a_run_and_leaves_alone_what_it_did_not_make(
    finished, images, tmp_path, refusal
):
    """And an overwrite that is refused has removed nothing."""
    out = shutil.copytree(finished, tmp_path / "run")
    (out / "notes.txt").write_text("mine")
    (out / "plots" / "thesis.png").write_text("mine")
    before = {path: path.read_bytes() for path in out.glob("[!.]*.*") if path.suffix != ".log"}
    arguments = ["train", images, "--epochs", 1, *QUICK, "-o", out, "-q", "--overwrite"]
    for code, *change in (
        (2, "--dim", 0),
        (2, "--batch-size", 1000),
        (3, "--labels", "no.csv"),
        (2, "--method", "supervised", "--known", "cat,dgo"),
        (2, "--method", "simsiam", "--augment", "multi-crop"),
    ):
        refusal(code, *arguments, *change)
        assert {path: path.read_bytes() for path in before} == before, change
    assert run(*arguments, "--seed", 1) == 0
    assert (out / "notes.txt").read_text() == (out / "plots" / "thesis.png").read_text() == "mine"
    assert read_toml(out / "config.toml")["seed"] == 1


def test_runs_inside_the_data_are_no_images_and_resume_goes_on_in_the_newest(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(save_images(tmp_path / "data", 24))
    arguments = ["train", ".", "--epochs", 1, *QUICK]
    assert run(*arguments) == run(*arguments) == 0
    assert capsys.readouterr().err.count("24 images") == 2
    assert run(*arguments, "--resume") == 0
    assert "already complete" in capsys.readouterr().err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["data-simclr", "data-simclr-2"]


def test_max_time_becomes_epochs_that_the_configuration_keeps(images, tmp_path):
    out = tmp_path / "run"
    arguments = ["train", images, "--max-time", "1s", *SMALL, "-o", out, "-q"]
    assert run(*arguments) == 0
    settings = read_toml(out / "config.toml")
    assert settings["max_time"] == ""
    assert settings["epochs"] >= 1
    assert run(*arguments, "--resume") == 0


def test_evaluate_prints_measures_beside_their_floors_as_json(finished, capsys):
    assert run("evaluate", str(finished), "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer["metrics"]) == {"encoder", "untrained", "pixels"}
    rank = answer["metrics"]["encoder"]["effective rank"]
    assert rank["value"] > 0
    assert rank["protocol"]
    assert "kNN top-1" in answer["left_out"]  # these images have no labels


def test_the_small_commands_answer(capsys):
    for command, expected in [
        (["list", "methods"], "simclr"),
        (["list", "backbones", "resnet18"], "torchvision/resnet18"),
        (["list", "settings", "moco"], "queue_size = 65536"),
        (["list", "recipes"], "recipe:cifar10/moco            "),
        (["list", "recipes", "cifar10/moco"], "\n# Published  82.6 % kNN"),
        (["doctor"], "precision"),
    ]:
        assert run(*command) == 0
        assert expected in capsys.readouterr().out


def test_lists_are_json_by_name(capsys):
    for words, name, said in (
        (["methods"], "simclr", "Each view must find the other"),
        (["pretrained", "dinov2"], "dinov2-small", "apache-2.0"),
        (["recipes"], "recipe:cifar10/moco", "MoCo"),
    ):
        assert run("list", *words, "--json") == 0
        assert json.loads(capsys.readouterr().out)[name].startswith(said)


NO_RECIPE = "error: there is no recipe "
UNLISTED = {
    "trian x": ("train",),
    "train x --precision fp23": ("fp32",),
    "list methods resnet19": ("resnet19",),
    "list methods mocov3": ("error: unknown method mocov3. Did you mean moco_v3?",),
    "list backbones resnet19": ("resnet19", "Did you mean"),
    "list pretrained resnet19": ("resnet19", "Did you mean"),
    "train digits --config recipe:moco_v2": (NO_RECIPE, "Did you mean imagenet/moco_v2?"),
    "discover digits --config recipe:cifar10/simlcr": (NO_RECIPE, "mean cifar10/simclr,"),
    "embed --config recipe:cifar10/moco.toml": (NO_RECIPE, "Did you mean cifar10/moco,"),
    "embed a b c": ("too many arguments: 'c'; a name with spaces takes quotes; `nearkin embed",),
    "classify a --encoder b": (
        "--encoder: ENCODER stands alone, without a name before it;",
        "`nearkin classify --help` shows",
    ),
    "duplicates a --treshold=0.3": ("unknown option --treshold. Did you mean threshold?; `",),
    "select a --budget 3": ("unknown option --budget; `nearkin select --help` shows",),
    "list recipes recipe:/etc/passwd": (NO_RECIPE, "`nearkin list recipes` lists them"),
    "train digits --config recipe:../recipes/cifar10/moco": (NO_RECIPE, "list recipes` lists"),
}
"""Names of methods, backbones and recipes that are not there, and what the refusal says."""


def test_names_that_are_not_listed_are_refused_with_the_nearest_ones(refusal):
    for typed, said in UNLISTED.items():
        line = refusal(2, *typed.split())
        assert all(text in line for text in said), typed


def test_commands_are_read_where_pydantic_has_been_imported(tmp_path, monkeypatch, refusal):
    """By which cyclopts then checks all defaults."""
    importlib.import_module("pydantic")
    monkeypatch.chdir(tmp_path)
    for code, *typed in (
        (3, "train"), (2, "classify", "b"), (2, "evaluate"), (2, "explore"), (2, "neighbors", "b"),
        (2, "select", "--num", 2), (3, "duplicates"), (3, "check"),
    ):  # fmt: skip
        assert tmp_path.name in refusal(code, typed[0], tmp_path / "none", *typed[1:]), typed


def test_every_recipe_is_listed_with_a_title_and_is_a_configuration_of_its_kind(capsys):
    assert run("list", "recipes") == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in rows] == [f"recipe:{name}" for name in recipe_files()]
    for name, title in rows:
        assert title.endswith((".", ":")) or len(title) > 40
        kind = DiscoverConfig if "/discovery/" in name.replace(":", "/") else TrainConfig
        assert read_toml(settings_file(Path(name)), kind)["epochs"] > 0


def test_what_config_prints_is_a_configuration_and_can_be_trained(tmp_path, images, capsys):
    for method in (name for name, cls in METHODS.items() if not cls.uses_labels):
        assert run("list", "settings", method) == 0
        file = tmp_path / f"{method}.toml"
        file.write_text(capsys.readouterr().out)
        settings = read_toml(file)
        settings.pop("data", None)
        config = TrainConfig(**settings)
        assert config.method == method
        assert checked_options(method, config.options) == config.options, method
    more = ["-o", tmp_path / "run", "--epochs", 1, "-q", *QUICK]
    assert run("train", images, "--config", tmp_path / "swav.toml", *more) == 0


def test_known_classes_are_learned_from_and_the_others_stay_hidden(tmp_path):
    for seed, name in enumerate(["cat", "dog", "eel"]):
        save_images(tmp_path / "images" / name, 10, seed=seed)
    paths = sorted((tmp_path / "images").rglob("*.png"))
    labels = [path.parent.name for path in paths[:-5]] + ["fox"] * 5  # half of the eels
    rows = [f"{path},{label}" for path, label in zip(paths, labels, strict=True)]
    (tmp_path / "foxes.csv").write_text("\n".join(["path,label", *rows, ""]))
    weights = []
    for number, (known, *more) in enumerate(
        [["cat,dog"], ["dog,cat"], ["cat,dog", "--labels", tmp_path / "foxes.csv"]]
    ):
        out = tmp_path / str(number)
        arguments = ["train", tmp_path / "images", "--method", "ncl", "--known", known, *more]
        arguments += ["--num-novel-classes", 2, "--epochs", 1, "-o", out, "-q", *QUICK]
        assert run(*arguments) == 0
        assert read_toml(out / "config.toml")["known"] == known.split(",")
        weights.append(load_file(out / "encoder.safetensors"))
    known, swapped, foxes = weights
    assert any((known[name] != swapped[name]).any() for name in known)
    assert all((known[name] == foxes[name]).all() for name in known)


def test_a_bug_is_one_line_and_its_traceback_is_in_the_log_or_on_screen(
    images, tmp_path, monkeypatch, capsys
):
    def broken(*_, **__):
        raise RuntimeError("of ours")

    monkeypatch.setattr("nearkin.commands.train.train_encoder", broken)
    arguments = ["train", images, *QUICK, "-q", "-o"]
    assert run(*arguments, tmp_path / "run") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: a bug in nearkin: RuntimeError: of ours; see the train.log ")
    log = (tmp_path / "run" / "train.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "RuntimeError: of ours" in log
    monkeypatch.setenv("NEARKIN_TRACEBACK", "")  # is off
    assert run(*arguments, tmp_path / "again") == 1
    monkeypatch.setenv("NEARKIN_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="of ours"):
        run(*arguments, tmp_path / "traced")
    assert run("evaluate", 300 * "i") == 3  # too long a name is no bug, so its line stays


REFUSED = {
    "--methd moco": "Did you mean method?",
    "--ouput x": "Did you mean output?",
    "--method mocco": "Did you mean moco?",
    "--backbone resnet19": "Did you mean",
    "--temperature 0": "--temperature",
    "--temperature warm": "--temperature warm",
    "--method moco --queue-size 70000": "--queue-size 70000",
    "--batch-size 1000": "--batch-size 1000",
    "--batch-size 1": "--batch-size 1",
    "--epochs 0": "--epochs 0",  # other settings: run/test_config.py
    "--device abacus": "device abacus",
    "--dim 12.5": "--dim 12.5 is not a whole number",
    "--method moco --queue-size 0": "--queue-size 0",
    "--method moco --momentum 1.5": "--momentum 1.5",
    "--epochs 3 --max-time 1h": "give one",
    "--max-time soon": "--max-time soon",
    "--augment moco_v9": "moco_v",
    "--method moco_end_to_end --key-encoder sam": "Did you mean same?",
    "--method moco --batch-size 8 --queue-size 4": "too small for the batch",
    "--method moco --batch-size 8 --bn-groups 3": "--bn-groups 3",
    "--method moco --batch-size 8 --bn-groups 8": "2 images or more",
    "--method swav --queue-from 1.5": "--queue-from 1.5 is not a number from 0 to 1",
    "--method nnclr --symmetric column": "--symmetric column",
    "--method nnclr --batch-size 8 --num-neighbors 19": "--support-size",
    "--method ncl": "--known",
    "--method simclr --known cat": "leave --known out",
    "--method moco --num-views 4": "moco takes 2 views of an image, not 4; leave --num-views out",
    "--method ncl --known cat": "--known cat: the data have no labels",
    "--method ncl --known 0,1,0": "--known 0,1,0 names a class twice",
}
"""Settings of a training, and what the refusal says."""


def test_settings_that_cannot_be_carried_out_are_refused_before_training(
    images, tmp_path, refusal
):
    for number, (typed, says) in enumerate(REFUSED.items()):
        line = refusal(2, "train", images, "-o", tmp_path / str(number), *typed.split())
        assert says in line, typed


def test_what_is_typed_goes_before_the_file_even_where_it_is_the_default(
    images, tmp_path, refusal
):
    """And what was refused does not stand in the way of it."""
    file, out = tmp_path / "config.toml", tmp_path / "run"
    file.write_text("data = 'x'\nseed = 3\nmethod = 'moco'\nbatch_size = 8\n")
    arguments = ["train", images, "--config", file, "--seed", 0, *QUICK, "-o", out, "-q"]
    arguments += ["--epochs", 1]
    refusal(2, *arguments, "--method", "simclrr")
    refusal(2, *arguments, "--method", "moco", "--queue-size", 70_000)
    refusal(2, *arguments, "--method", "ncl", "--known", "cat")  # known once the method is built
    assert run(*arguments, "--method", "simclr") == 0
    settings = read_toml(out / "config.toml")
    assert (settings["seed"], settings["method"]) == (0, "simclr")


def test_resuming_keeps_the_labels_and_the_split_of_the_run(tmp_path, capsys):
    data = save_images(tmp_path / "data", 24)
    table = tmp_path / "labels.csv"
    parts = ["test" if n % 3 == 0 else "train" for n in range(24)]
    rows = [f"{n:03d}.png,{n % 2},{part}" for n, part in enumerate(parts)]
    table.write_text("path,label,split\n" + "\n".join(rows) + "\n")
    out = tmp_path / "run"
    arguments = ["train", data, "--epochs", 1, *SMALL, "-o", out]
    assert run(*arguments, "--labels", table) == 0
    (out / "summary.json").unlink()  # so that it is measured again
    (out / "metrics.csv").unlink()  # as damaged, it is in the way
    assert run(*arguments, "--resume") == 0
    assert capsys.readouterr().err.count("8 held out") == 2
    assert json.loads((out / "summary.json").read_text())["sizes"] == {"train": 16, "test": 8}


def test_labels_do_not_change_one_bit_of_the_encoder(finished, images, tmp_path):
    """Nor does what is measured: `finished` has no labels."""
    rows = [f"{n:03d}.png,class{n * n % 3}" for n in range(40)]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label", *rows, ""]))
    arguments = ["train", images, "--labels", tmp_path / "labels.csv", "--epochs", 2, *SMALL]
    assert run(*arguments, "-o", tmp_path / "run", "-q") == 0
    encoders = (folder / "encoder.safetensors" for folder in (finished, tmp_path / "run"))
    assert next(encoders).read_bytes() == next(encoders).read_bytes()


def test_python_has_the_names_and_defaults_of_the_command_line(finished, images, tmp_path):
    import nearkin

    small = dict(backbone="tiny", image_size=16, batch_size=8, device="cpu")
    run = nearkin.train(images, epochs=2, **small, output=tmp_path / "run", report=False)
    assert (run.path / "metrics.csv").read_bytes() == (finished / "metrics.csv").read_bytes()
    encoder = nearkin.load(run.path)
    image = Image.open(next(Path(images).iterdir()))
    assert encoder(encoder.transform(image)[None]).shape == (1, encoder.num_features)
