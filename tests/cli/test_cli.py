"""The command line as people use it: real files, real runs, real exit codes."""

import csv
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nearkin.cli import main
from nearkin.config import DiscoverConfig, TrainConfig, read_toml, recipes, settings_file
from nearkin.methods import METHODS
from nearkin.run.settings import checked_options


def save_images(folder, count, size=(24, 20), seed=0):
    """Images of real structure: colored blobs on noise."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for number in range(count):
        pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        pixels[5:15, 3 : 12 + number % 8] = rng.integers(0, 256, 3)
        Image.fromarray(pixels).save(folder / f"{number:03d}.png")
    return folder


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("flat") / "images", 40)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, images):
    """A finished run on flat, unlabeled images; read, never written."""
    out = tmp_path_factory.mktemp("runs") / "first"
    code = main(
        ["train", str(images), "--epochs", "2", "--batch-size", "8", "--out", str(out), "-q"]
    )
    assert code == 0
    return out


QUICK = ["--backbone", "tiny", "--image-size", "16", "--evaluate-every", "0", "--batch-size", "8"]


def failure(arguments, capsys):
    """The exit code, and the one line on standard error that goes with it."""
    code = main([str(argument) for argument in arguments])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, lines
    return code, lines[0]


def test_a_run_leaves_every_file_that_the_documentation_names(finished):
    assert {path.name for path in finished.iterdir()} >= {
        "checkpoints", "config.toml", "embeddings.parquet", "encoder.safetensors",
        "metrics.csv", "plots", "projector.safetensors", "summary.json", "train.log",
    }  # fmt: skip
    assert {path.name for path in (finished / "plots").iterdir()} == {
        "augmentations.png", "curves.png", "map.png", "neighbors.png",
    }  # fmt: skip


def test_the_configuration_of_a_run_repeats_it_to_the_bit(finished, tmp_path):
    again = tmp_path / "again"
    assert main(["train", "--config", str(finished / "config.toml"), "-o", str(again), "-q"]) == 0
    for name in ("metrics.csv", "encoder.safetensors"):
        assert (again / name).read_bytes() == (finished / name).read_bytes()


def test_resuming_a_finished_run_changes_nothing(finished, images, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*.safetensors")}
    arguments = ["train", images, "--epochs", 2, "--batch-size", 8, "-o", finished, "--resume"]
    assert main([str(argument) for argument in arguments]) == 0
    assert "already complete" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*.safetensors")}


def test_another_configuration_is_refused_and_the_difference_is_named(finished, images, capsys):
    arguments = ["train", images, "--epochs", 9, "--batch-size", 8, "-o", finished, "--resume"]
    code, line = failure(arguments, capsys)
    assert code == 2
    assert "--epochs 2 became 9" in line


def test_a_folder_that_is_not_empty_is_refused_and_both_ways_out_are_named(
    finished, images, capsys
):
    code, line = failure(["train", images, "-o", finished], capsys)
    assert code == 4
    assert "--resume" in line
    assert "--overwrite" in line


def test_overwriting_replaces_a_run_and_leaves_alone_what_it_did_not_make(images, tmp_path):
    out = tmp_path / "run"
    arguments = ["train", images, "--epochs", 1, *QUICK, "-o", out, "-q"]
    assert main([str(argument) for argument in arguments]) == 0
    (out / "notes.txt").write_text("mine")
    (out / "plots" / "thesis.png").write_text("mine")
    assert main([str(argument) for argument in [*arguments, "--overwrite", "--seed", 1]]) == 0
    assert (out / "notes.txt").read_text() == (out / "plots" / "thesis.png").read_text() == "mine"
    assert tomllib.loads((out / "config.toml").read_text())["seed"] == 1


def test_overwriting_spares_folders_that_are_no_run(images, tmp_path, capsys):
    out = tmp_path / "mine"
    out.mkdir()
    (out / "metrics.csv").write_text("mine")
    code, line = failure(["train", images, "-o", out, "--overwrite"], capsys)
    assert code == 4
    assert "is no run" in line
    assert (out / "metrics.csv").read_text() == "mine"


@pytest.mark.parametrize(
    "change", [["--dim", "0"], ["--batch-size", "1000"], ["--labels", "no.csv"]]
)
def test_a_refused_overwrite_has_removed_nothing(change, images, tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["train", images, "--epochs", 1, *QUICK, "-o", out, "-q"]
    assert main([str(argument) for argument in arguments]) == 0
    before = {path: path.read_bytes() for path in out.glob("[!.]*.*") if path.suffix != ".log"}
    failure([*arguments, "--overwrite", *change], capsys)
    assert {path: path.read_bytes() for path in before} == before


def test_runs_inside_the_data_are_no_images(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(save_images(tmp_path / "data", 24))
    arguments = ["train", ".", "--epochs", "1", *QUICK]
    assert main(arguments) == 0
    assert main(arguments) == 0
    assert capsys.readouterr().err.count("24 images") == 2


def test_max_time_becomes_epochs_that_the_configuration_keeps(images, tmp_path):
    out = tmp_path / "run"
    arguments = ["train", images, "--max-time", "1s", "--batch-size", 8, "--backbone", "tiny"]
    assert main([str(argument) for argument in [*arguments, "-o", out, "-q"]]) == 0
    settings = tomllib.loads((out / "config.toml").read_text())
    assert settings["max_time"] == ""
    assert settings["epochs"] >= 1
    assert main([str(argument) for argument in [*arguments, "-o", out, "-q", "--resume"]]) == 0


def test_embeddings_do_not_replace_the_table_they_were_made_from(finished, images, capsys):
    table = images.parent / "images.csv"
    table.write_text("path\n" + "\n".join(f"images/{n:03d}.png" for n in range(40)) + "\n")
    code, line = failure(["embed", finished, table, "-o", table.with_suffix(".npy")], capsys)
    assert code == 2
    assert "would replace the data" in line


def test_evaluate_prints_measures_beside_their_floors_as_json(finished, capsys):
    assert main(["evaluate", str(finished), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer["measures"]) == {"encoder", "untrained", "pixels"}
    rank = answer["measures"]["encoder"]["effective rank"]
    assert rank["value"] > 0
    assert rank["protocol"]
    assert "kNN top-1" in answer["left_out"]  # these images have no labels


@pytest.mark.parametrize("ending", [".parquet", ".npz", ".npy"])
def test_embed_writes_a_row_per_image(finished, images, tmp_path, ending):
    path = tmp_path / f"vectors{ending}"
    assert main(["embed", str(finished), str(images), "-o", str(path)]) == 0
    if ending == ".parquet":
        from pyarrow import parquet

        table = parquet.read_table(path)
        vectors = np.array(table["vector"].to_pylist(), np.float32)
        paths = table["path"].to_pylist()
    elif ending == ".npz":
        stored = np.load(path, allow_pickle=False)
        vectors, paths = stored["vector"], stored["path"].tolist()
    else:
        vectors = np.load(path, allow_pickle=False)
        with path.with_suffix(".csv").open(newline="") as file:
            paths = [row["path"] for row in csv.DictReader(file)]
    assert paths == sorted(path.name for path in images.iterdir())
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_unknown_endings_are_refused_before_anything_is_computed(finished, images, capsys):
    code, line = failure(["embed", finished, images, "-o", "vectors.pt"], capsys)
    assert code == 2
    assert ".parquet" in line


def test_the_small_commands_answer(capsys):
    for command, expected in [
        (["methods"], "simclr"),
        (["backbones", "resnet18"], "torchvision/resnet18"),
        (["config", "moco"], "queue_size = 65536"),
        (["config", "--recipes"], "recipe:cifar10/moco            "),
        (["config", "recipe:cifar10/moco"], "\n# Published  82.6 % kNN"),
        (["doctor"], "precision"),
    ]:
        assert main(command) == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["methods", "resnet19"],
        ["backbones", "resnet19"],
        ["backbones", "--pretrained", "resnet19"],
    ],
)
def test_names_that_are_not_listed_are_refused(words, capsys):
    code, line = failure(words, capsys)
    assert code == 2
    assert "resnet19" in line
    if words[0] == "backbones":
        assert "Did you mean" in line


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("train digits --config recipe:moco_v2", "Did you mean imagenet/moco_v2?"),
        ("discover digits --config recipe:cifar10/simlcr", "Did you mean cifar10/simclr,"),
        ("embed --config recipe:cifar10/moco.toml", "Did you mean cifar10/moco,"),
        ("config recipe:/etc/passwd", "`nearkin config --recipes` lists them"),
        (
            "train digits --config recipe:../recipes/cifar10/moco",
            "`nearkin config --recipes` lists",
        ),
    ],
)
def test_a_recipe_that_is_not_there_is_a_line_with_the_nearest_names(words, meant, capsys):
    code, line = failure(words.split(), capsys)
    assert code == 2
    assert line.startswith("error: there is no recipe ")
    assert meant in line


def test_every_recipe_is_listed_with_a_title_and_is_a_configuration_of_its_kind(capsys):
    assert main(["config", "--recipes"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in rows] == [f"recipe:{name}" for name in recipes()]
    for name, title in rows:
        assert title.endswith((".", ":")) or len(title) > 40
        kind = DiscoverConfig if "/discovery/" in name.replace(":", "/") else TrainConfig
        assert read_toml(settings_file(Path(name)), kind)["epochs"] > 0


@pytest.mark.parametrize("method", [name for name, cls in METHODS.items() if not cls.uses_labels])
def test_what_config_prints_is_a_configuration(method, tmp_path, capsys):
    assert main(["config", method]) == 0
    file = tmp_path / "config.toml"
    file.write_text(capsys.readouterr().out)
    settings = read_toml(file)
    settings.pop("data", None)
    config = TrainConfig(**settings)
    assert config.method == method
    assert checked_options(method, config.options) == config.options


def test_what_config_prints_can_be_trained(tmp_path, images, capsys):
    assert main(["config", "swav"]) == 0
    file = tmp_path / "config.toml"
    file.write_text(capsys.readouterr().out)
    out = tmp_path / "run"
    arguments = ["train", images, "--config", file, "-o", out, "--epochs", 1, "-q", *QUICK]
    assert main([str(argument) for argument in arguments]) == 0


def test_known_classes_are_learned_from_and_the_others_stay_hidden(tmp_path):
    for seed, name in enumerate(["cat", "dog", "eel"]):
        save_images(tmp_path / "images" / name, 10, seed=seed)
    weights = []
    for number, known in enumerate(["cat,dog", "dog,cat"]):
        out = tmp_path / str(number)
        arguments = ["train", tmp_path / "images", "--method", "ncl", "--known", known, "-q"]
        arguments += ["--num-novel-classes", 2, "--epochs", 1, "-o", out, *QUICK]
        assert main([str(argument) for argument in arguments]) == 0
        assert tomllib.loads((out / "config.toml").read_text())["known"] == known
        weights.append((out / "encoder.safetensors").read_bytes())
    assert weights[0] != weights[1]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--methd", "moco"], 2, "Did you mean method?"),
        (["--method", "mocco"], 2, "Did you mean moco?"),
        (["--backbone", "resnet19"], 2, "Did you mean"),
        (["--temperature", "0"], 2, "--temperature"),
        (["--temperature", "warm"], 2, "--temperature warm"),
        (["--method", "moco", "--queue-size", "70000"], 2, "--queue-size 70000"),
        (["--batch-size", "1000"], 2, "--batch-size 1000"),
        (["--batch-size", "1"], 2, "--batch-size 1"),
        (["--epochs", "0"], 2, "--epochs 0"),
        (["--seed", "-1"], 2, "--seed -1"),
        (["--save-every", "0"], 2, "--save-every 0"),
        (["--weight-decay", "-1"], 2, "--weight-decay -1"),
        (["--device", "abacus"], 2, "device abacus"),
        (["--dim", "0"], 2, "--dim 0"),
        (["--dim", "12.5"], 2, "--dim 12.5 is not a whole number"),
        (["--method", "moco", "--queue-size", "0"], 2, "--queue-size 0"),
        (["--method", "moco", "--momentum", "1.5"], 2, "--momentum 1.5"),
        (["--epochs", "3", "--max-time", "1h"], 2, "give one"),
        (["--max-time", "soon"], 2, "--max-time soon"),
        (["--augment", "moco_v9"], 2, "moco_v"),
        (["--method", "moco_end_to_end", "--key-encoder", "sam"], 2, "Did you mean same?"),
        (["--method", "moco", "--batch-size", "8", "--queue-size", "4"], 2, "a batch of 8"),
        (["--method", "moco", "--batch-size", "8", "--bn-groups", "3"], 2, "--bn-groups 3"),
        (["--method", "moco", "--batch-size", "8", "--bn-groups", "8"], 2, "2 images or more"),
        (["--method", "swav", "--queue-from", "1.5"], 2, "--queue-from 1.5 is not from 0 to 1"),
        (["--method", "swav", "--epsilon", "0"], 2, "--epsilon 0"),
        (["--method", "dino", "--target-temperature", "0"], 2, "--target-temperature 0"),
        (["--method", "nnclr", "--symmetric", "column"], 2, "--symmetric column"),
        (["--method", "nnclr", "--batch-size", "8", "--num-neighbors", "19"], 2, "--support-size"),
        (["--method", "ncl"], 2, "--known"),
        (["--method", "simclr", "--known", "cat"], 2, "leave --known out"),
        (["--method", "ncl", "--known", "cat"], 2, "--known cat is no class"),
        (["--method", "ncl", "--known", "0,1,0"], 2, "--known 0,1,0 names a class twice"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_carried_out_are_refused_before_training(
    arguments, code, says, images, tmp_path, capsys
):
    exit_code, line = failure(["train", images, "-o", tmp_path / "run", *arguments], capsys)
    assert exit_code == code
    assert says in line


def test_wrong_names_on_the_command_line_exit_with_2(capsys):
    assert main(["trian", "x"]) == 2
    assert "train" in capsys.readouterr().err
    assert main(["train", "x", "--precision", "fp23"]) == 2
    assert "fp32" in capsys.readouterr().err


def test_values_of_the_wrong_kind_in_a_file_are_refused(images, tmp_path):
    """In a process of its own: in this one, type checks of the tests would come first."""
    cases = {
        "epochs = 'ten'": "--epochs ten is not a whole number or auto",
        "options = 3": "--options 3 is not a table",
        "precision = 'fp16'": "--precision fp16 is not auto or fp32 or bf16. Did you mean bf16?",
        "seed = true": "--seed True is not a whole number",
    }
    for number, content in enumerate(cases):
        (tmp_path / f"{number}.toml").write_text(content)
    code = (
        "import sys; from nearkin.cli import main\n"
        "for file in sys.argv[2:]: assert main(['train', sys.argv[1], '--config', file]) == 2"
    )
    files = [str(tmp_path / f"{number}.toml") for number in range(len(cases))]
    command = [sys.executable, "-c", code, str(images), *files]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr.splitlines() == [f"error: {says}" for says in cases.values()]


def test_what_is_typed_goes_before_the_file_even_where_it_is_the_default(images, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("data = 'x'\nseed = 3\nmethod = 'moco'\nepochs = 1\nbatch_size = 8\n")
    out = tmp_path / "run"
    arguments = ["train", images, "--config", file, "--seed", 0, "--method", "simclr"]
    assert main([str(argument) for argument in [*arguments, "-o", out, "-q"]]) == 0
    settings = tomllib.loads((out / "config.toml").read_text())
    assert (settings["seed"], settings["method"], settings["epochs"]) == (0, "simclr", 1)


def test_a_memory_as_large_as_the_papers_is_allowed_with_a_warning(images, tmp_path):
    arguments = ["train", images, "-o", tmp_path / "run", "--epochs", 1, *QUICK, "-q"]
    arguments += ["--method", "nnclr", "--support-size", 1000, "--dim", 8, "--hidden-dim", 8]
    assert main([str(argument) for argument in arguments]) == 0
    settings = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert settings["options"]["support_size"] == 1000
    log = (tmp_path / "run" / "train.log").read_text()
    assert "warning: --support-size 1000 is more than half of the " in log


def test_a_refused_setting_does_not_stand_in_the_way_of_the_right_one(images, tmp_path, capsys):
    arguments = ["train", images, "-o", tmp_path / "run", "--epochs", 1, *QUICK, "-q"]
    failure([*arguments, "--method", "simclrr"], capsys)
    failure([*arguments, "--method", "moco", "--queue-size", 70_000], capsys)
    assert main([str(argument) for argument in arguments]) == 0


def test_without_out_resume_goes_on_in_the_newest_folder(images, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", str(images), "--epochs", "1", *QUICK]
    assert main(arguments) == 0
    assert main(arguments) == 0
    assert main([*arguments, "--resume"]) == 0
    assert "already complete" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "images-simclr", "images-simclr-2",
    }  # fmt: skip


def test_resuming_keeps_the_labels_and_the_split_of_the_run(tmp_path, capsys):
    data = save_images(tmp_path / "data", 24)
    table = tmp_path / "labels.csv"
    parts = ["test" if n % 3 == 0 else "train" for n in range(24)]
    rows = [f"{n:03d}.png,{n % 2},{part}" for n, part in enumerate(parts)]
    table.write_text("path,label,split\n" + "\n".join(rows) + "\n")
    out = tmp_path / "run"
    arguments = ["train", data, "--epochs", 1, *QUICK, "-o", out]
    assert main([str(argument) for argument in [*arguments, "--labels", table]]) == 0
    (out / "summary.json").unlink()  # so that it is measured again
    assert main([str(argument) for argument in [*arguments, "--resume"]]) == 0
    assert capsys.readouterr().err.count("8 held out") == 2
    assert json.loads((out / "summary.json").read_text())["sizes"] == {"train": 16, "test": 8}


def test_unknown_keys_of_a_configuration_file_are_refused(images, tmp_path, capsys):
    file = tmp_path / "config.toml"
    file.write_text("epocs = 3\n")
    code, line = failure(["train", images, "--config", file, "-o", tmp_path / "run"], capsys)
    assert code == 2
    assert "epocs" in line
    assert "Did you mean epochs?" in line


@pytest.mark.parametrize("content", ["nothing", "text", "one"])
def test_data_that_cannot_be_trained_on_are_refused(content, tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    if content == "text":
        (data / "readme.txt").write_text("no image")
    if content == "one":
        save_images(data, 1)
    code, line = failure(["train", data, "-o", tmp_path / "run"], capsys)
    assert code == 3
    assert "image" in line


def test_more_unreadable_images_than_allowed_stop_the_run(tmp_path, capsys):
    data = save_images(tmp_path / "data", 6)
    for number in range(4):
        (data / f"bad{number}.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    code, line = failure(["train", data, "-o", tmp_path / "run"], capsys)
    assert code == 3
    assert "--max-bad" in line
    assert "bad0.png" in line


def test_some_unreadable_images_are_listed_and_left_out(tmp_path):
    data = save_images(tmp_path / "data", 30)
    (data / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    out = tmp_path / "run"
    assert (
        main(["train", str(data), "--epochs", "1", "--batch-size", "8", "-o", str(out), "-q"]) == 0
    )
    with (out / "bad_files.csv").open(newline="") as file:
        assert [row["path"] for row in csv.DictReader(file)] == ["bad.png"]


def test_fewer_images_than_a_batch_or_a_queue_shrink_what_was_left_to_auto(tmp_path, capsys):
    data = save_images(tmp_path / "data", 20)
    out = tmp_path / "run"
    assert main(["train", str(data), "--method", "moco", "--epochs", "1", "-o", str(out)]) == 0
    settings = tomllib.loads((out / "config.toml").read_text())
    from pyarrow import parquet

    trained_on = parquet.read_table(out / "embeddings.parquet")["split"].to_pylist().count("train")
    assert settings["batch_size"] == trained_on < 20
    assert settings["options"]["queue_size"] == trained_on // 2
    err = capsys.readouterr().err
    assert f"--batch-size {trained_on}" in err
    assert f"--queue-size {trained_on // 2}" in err


def test_photographs_train_with_workers_as_without(tmp_path):
    data = save_images(tmp_path / "data", 24, size=(120, 90))
    made = []
    for workers in (0, 2):
        out = tmp_path / f"run{workers}"
        arguments = ["train", data, "--epochs", 2, *QUICK, "--workers", workers, "-o", out, "-q"]
        assert main([str(argument) for argument in arguments]) == 0
        made.append((out / "encoder.safetensors").read_bytes())
    assert made[0] == made[1]


def test_labels_do_not_change_one_bit_of_the_encoder(tmp_path):
    data = save_images(tmp_path / "data", 24)
    made = []
    for seed in (0, 1):
        table = tmp_path / f"labels{seed}.csv"
        labels = np.random.default_rng(seed).permutation(24) % 3
        rows = [f"{n:03d}.png,class{label}" for n, label in enumerate(labels)]
        table.write_text("path,label\n" + "\n".join(rows) + "\n")
        out = tmp_path / f"run{seed}"
        arguments = ["train", data, "--labels", table, "--epochs", 2, *QUICK]
        assert main([str(a) for a in [*arguments, "-o", out, "-q"]]) == 0
        made.append((out / "encoder.safetensors").read_bytes())
    assert made[0] == made[1]


def test_help_and_module_entry_work_as_a_process():
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "nearkin", "--help"],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    for verb in ("demo", "check", "train", "evaluate", "embed", "methods", "backbones", "doctor"):
        assert verb in done.stdout


def test_the_environment_sets_what_the_command_line_does_not(images, tmp_path, monkeypatch):
    monkeypatch.setenv("NEARKIN_EPOCHS", "1")
    monkeypatch.setenv("NEARKIN_BATCH_SIZE", "16")
    out = tmp_path / "run"
    assert main(["train", str(images), "--batch-size", "8", "-o", str(out), "-q"]) == 0
    settings = tomllib.loads((out / "config.toml").read_text())
    assert (settings["epochs"], settings["batch_size"]) == (1, 8)


def test_python_has_the_names_and_defaults_of_the_command_line(finished, images, tmp_path):
    import nearkin

    run = nearkin.train(images, epochs=2, batch_size=8, out=tmp_path / "run")
    assert (run.path / "metrics.csv").read_bytes() == (finished / "metrics.csv").read_bytes()
    encoder = nearkin.load(run.path)
    image = Image.open(next(Path(images).iterdir()))
    assert encoder(encoder.transform(image)[None]).shape == (1, encoder.dim)


def test_a_run_is_not_resumed_on_images_that_have_changed(tmp_path, capsys):
    data = save_images(tmp_path / "data", 24)
    arguments = ["train", data, "--epochs", 1, *QUICK, "-o", tmp_path / "run", "-q"]
    assert main([str(argument) for argument in arguments]) == 0
    (data / "000.png").unlink()
    code, line = failure([*arguments, "--resume"], capsys)
    assert code == 5
    assert "bring them back" in line


@pytest.mark.parametrize(
    "words",
    [["train", "DATA"], ["classify", "DATA"], ["embed", "resnet18@w.pth", "DATA"],
     ["discover", "DATA", "--known", "a,b"]],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_variable_that_is_no_setting_is_named(words, images, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NEARKIN_EPOCHS_X", "1")
    words = [str(images) if word == "DATA" else word for word in words]
    code, line = failure([*words, "--out", tmp_path / "run"], capsys)
    assert code == 2
    assert "unknown option NEARKIN_EPOCHS_X" in line


@pytest.mark.parametrize("variable", ["NEARKIN_TRACEBACK", "NEARKIN_TORCHVISION"])
def test_variables_that_are_no_settings_are_not_taken_for_options(
    variable, images, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(variable, "1")
    arguments = ["train", str(images), "-o", str(tmp_path / "run"), "--epochs", "0"]
    assert main(arguments) == 2
    assert "--epochs 0" in capsys.readouterr().err
