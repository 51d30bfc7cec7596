"""Arguments of commands from Python: checked by their types, as the command line checks options."""

import inspect
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import encoded, fill, pixels, write_network
from nearkin_command import run

import nearkin
from nearkin.commands.arguments import command, given
from nearkin.config import DiscoverConfig, TrainConfig, excluded
from nearkin.data.opening import open_images
from nearkin.distributed import check_gpus
from nearkin.errors import DataError, UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.table import open_table
from nearkin.evaluation.vectors import write_embeddings
from nearkin.run.reporter import Silent

QUIET = {"workers": 0, "verbose": False}


def features_of_no_images():
    vectors = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    return Embeddings(
        vectors / np.linalg.norm(vectors, axis=1, keepdims=True),
        np.arange(60) % 3,
        paths=[f"{n:02}.png" for n in range(60)],
        classes=("a", "b", "c"),
    )


FEATURES = features_of_no_images()


def test_every_command_checks_its_arguments():
    """By one decorator, so that none is forgotten."""
    names = [*nearkin._COMMANDS, "embed_run", "embed_shards", "rank", "describe_method"]
    for name in names:
        assert inspect.unwrap(getattr(nearkin, name)) is not getattr(nearkin, name), name


def torch_modes():
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    return grad, autocast, torch.zeros(()).dtype, torch.zeros(()).device.type


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def two_weights_under_autocast():
    """A product by a weight that changes between two uses, as a training changes it."""
    weight, ones = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4)
    products = []
    for value in (1.0, 2.0):
        with torch.autocast("cpu", torch.bfloat16):
            weight.data.fill_(value)
            products.append((weight @ ones)[0, 0].item())
    return products


def test_weights_that_were_cast_are_forgotten_within_autocast_of_the_caller():
    with torch.autocast("cpu", torch.bfloat16):
        assert two_weights_under_autocast() == [4, 4]  # what nobody wants
        assert command(two_weights_under_autocast)() == [4, 8]
        assert torch.is_autocast_enabled("cpu")
    assert command(two_weights_under_autocast)() == [4, 8] == two_weights_under_autocast()


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.no_grad,
        torch.inference_mode,
        lambda: default_dtype(torch.float64),
        lambda: torch.device("meta"),
    ],
)
def test_what_the_caller_has_set_in_torch_changes_nothing(mode, tmp_path):
    file, images = write_network(tmp_path / "encoder.safetensors"), pixels(4, 16)
    expected, outside = nearkin.embed(file, images, **QUIET), torch_modes()
    with mode():
        before = torch_modes()
        assert before != outside
        assert command(torch_modes)() == outside
        found = nearkin.embed(nearkin.load(file), images, **QUIET)
        assert torch_modes() == before
    np.testing.assert_array_equal(found.vectors, expected.vectors)
    assert found.encoder == expected.encoder
    assert torch_modes() == outside


REFUSED = [
    ("select", [FEATURES], {"num": 3, "rule": "Typical"}, "rule Typical is not typical or"),
    ("select", [FEATURES], {"num": 2.5}, "num 2.5 is not a whole number of at least 1"),
    ("select", [FEATURES], {"num": True}, "num true is not a whole number"),
    ("select", [FEATURES], {"num": 2, "seed": -1}, "seed -1 is not a whole number from 0"),
    ("evaluate", [FEATURES], {"features": "embeddings"}, "features embeddings is not"),
    ("evaluate", [FEATURES], {"protocol": ["kn"]}, r"protocol kn is not a list of .*mean k"),
    ("evaluate", [FEATURES], {"protocol": "knn"}, "protocol knn is not a list"),
    ("evaluate", [FEATURES, np.zeros((3, 9, 9))], {}, "of features, no images are read"),
    ("evaluate", [FEATURES], {"workers": -1}, "workers -1 is not"),
    ("evaluate", [FEATURES], {"verbose": 0}, "verbose is of type int; give bool or Reporter"),
    ("check", ["digits"], {"scan": "everything"}, "scan everything is not headers"),
    ("rank", [["a", "b"]], {"by": "knn"}, "by knn is not effective-rank, agree"),
    ("export", ["run"], {"format": "tensorflow"}, "format tensorflow is not"),
    ("embed_shards", ["e", "d"], {"output": "x", "engine": "Ray"}, "engine Ray is not"),
    ("embed_shards", ["e", "d"], {"output": "x", "shard_size": 2.5}, "shard_size 2.5"),
    ("neighbors", ["e", ["a.png"]], {"top": 2.5}, "top 2.5 is not"),
    ("neighbors", ["e", np.zeros((3, 9))], {}, "images is of type ndarray; give text or a path"),
    ("neighbors", ["e", [np.zeros(3)]], {}, "images is of type ndarray; give text or a path"),
    ("duplicates", ["d"], {"encoder": "e", "threshold": "0.9"}, "threshold 0.9 is not"),
    ("audit", [FEATURES], {"precision": "0.9"}, "precision 0.9 is not a number"),
    ("train", ["digits", {"epochs": 3}], {}, "config is of type dict; give TrainConfig"),
    ("train", ["digits", nearkin.EmbedConfig()], {}, "config is of type EmbedConfig"),
    ("explore", ["run"], {"port": 99_999}, "port 99999 is not a whole number from 0"),
    ("load", ["run"], {"image_size": "big"}, "image_size big is not auto or a whole"),
    ("load", ["run"], {"image_size": 24.7}, "image_size 24.7 is not"),
]
"""Calls by the name of the function, and what the refusal says."""


@pytest.mark.parametrize(("name", "values", "named", "message"), REFUSED)
def test_an_argument_of_another_type_is_refused_before_anything_is_opened(
    name, values, named, message
):
    with pytest.raises(UsageError, match=message):
        getattr(nearkin, name)(*values, **named)


@pytest.mark.parametrize(
    "words",
    [
        ("train", "{data}", "--epochs", "1.5"),
        ("select", "run", "--num", "2.6"),
        ("select", "run", "--num", "2", "--seed", "-1"),
        ("neighbors", "run", "a.png", "--top", "1.4"),
        ("embed", "run", "{data}", "--shard-size", "10.4", "-o", "shards"),
        ("evaluate", "run", "--workers", "-1"),
        ("explore", "run", "--port", "x"),
    ],
)
def test_the_command_line_rounds_no_number(tmp_path, capsys, words):
    fill(tmp_path, "a/1.png", "b/2.png")
    code = run(*(word.format(data=tmp_path) for word in words))
    assert code == 2
    message = capsys.readouterr().err
    assert " is not " in message
    assert message.count("\n") == 1


def test_numbers_of_numpy_paths_and_durations_are_taken(tmp_path):
    assert len(nearkin.select(FEATURES, num=np.int64(2), seed=np.uint8(3)).paths) == 2
    config = TrainConfig(max_time=timedelta(minutes=5), labels=Path("l.csv"), epochs=np.int64(3))
    assert (config.max_time, config.labels, config.epochs) == (300.0, "l.csv", 3)
    for wrong in (0, timedelta(0), "0", -1):
        with pytest.raises(UsageError, match="is not a duration"):
            TrainConfig(max_time=wrong)
    fill(tmp_path, "x/1.png", "x/2.png", "y/3.png", "y/4.png")
    (tmp_path / "l.csv").write_text("path,label\nx/1.png,one\n")
    found = nearkin.check(tmp_path, labels=tmp_path / "l.csv", verbose=False)
    assert "one" in found.images.classes
    with pytest.raises(UsageError, match="labels"):
        open_images(tmp_path, labels=["x"])


def test_the_home_folder_is_found_in_what_is_read_and_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(fill(tmp_path / "here", "a.png"))
    nearkin.select(FEATURES, num=2, output="~/chosen.csv")
    assert (tmp_path / "chosen.csv").exists()
    assert not Path("~").exists()
    with pytest.raises(UsageError, match=str(tmp_path)):
        nearkin.load("~/run/encoder.safetensors")


def test_settings_that_are_paths_may_begin_at_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for kind, names in (
        (DiscoverConfig, ("encoder", "accept", "copy_to")),
        (TrainConfig, ("teacher",)),
    ):
        found, _ = given(kind, None, dict.fromkeys(names, "~/x"))
        assert {getattr(found, name) for name in names} == {f"{tmp_path}/x"}
    config = DiscoverConfig(encoder="~/x", copy_to="./~/x")
    found, _ = given(DiscoverConfig, config, {"seed": 3})
    assert (found.encoder, found.copy_to, found.seed) == (f"{tmp_path}/x", "./~/x", 3)


def test_one_path_is_a_list_of_one_and_an_iterator_is_read_once(
    trained_run, digits_file, tmp_path
):
    image = tmp_path / "a.png"
    image.write_bytes(encoded(0, (20, 10)))
    (alone,) = nearkin.neighbors(trained_run, image, top=2)
    (of_text,) = nearkin.neighbors(trained_run, str(image), top=2)
    sheet = tmp_path / "sheet.png"
    (of_iterator,) = nearkin.neighbors(
        trained_run, tmp_path.glob("a.png"), top=2, output=sheet, data=digits_file
    )
    assert alone.neighbors == of_text.neighbors == of_iterator.neighbors
    assert sheet.exists()


def test_what_cannot_be_read_is_counted(trained_run, tmp_path, caplog):
    """Whether the header of a file says so, or only its pixels."""
    fill(tmp_path, *(f"{n}.png" for n in range(5)))
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.png").write_text("no image")
    whole = encoded(9, (20, 10))
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) - 30])
    bad = ["cut.png", "empty.jpg", "text.png"]
    embeddings = nearkin.embed(trained_run, tmp_path, workers=0)
    assert [*embeddings.bad] == bad
    assert len(embeddings) == 5
    found = nearkin.duplicates(tmp_path, workers=0)
    assert ([*found.bad], found.num_images) == (bad, 5)
    assert [*found.to_dict()["bad"]] == bad
    (tmp_path / "kept").mkdir()
    nearkin.duplicates(tmp_path, apply=tmp_path / "kept" / "kept.csv", verbose=False)
    assert "cut.png" not in (tmp_path / "kept" / "kept.csv").read_text()
    assert "2 of 8 images, which cannot be read, such as 'empty.jpg (" in caplog.text


def test_features_need_no_more_than_vectors_and_labels(tmp_path):
    few = Embeddings(FEATURES.vectors, FEATURES.labels)
    assert nearkin.evaluate(few, protocol=["knn"], verbose=False).metrics
    assert set(nearkin.select(few, num=2, verbose=False).paths) <= {f"{n:02}" for n in range(60)}
    assert few.class_names[:4].tolist() == ["0", "1", "2", "0"]
    names = np.array([f"{n}.png" for n in range(60)])  # as scikit-learn keeps them
    few = replace(few, classes=np.array(["a", "b", "c"]), paths=names, group_names=names)
    assert (few.classes, few.paths[1], few.named_groups[1]) == (("a", "b", "c"), "1.png", "1.png")
    assert nearkin.select(few, num=1, verbose=False).paths[0] in names.tolist()
    write_embeddings(tmp_path / "t.parquet", replace(few, removed="camera", encoder="digest"))
    read = open_table(tmp_path / "t.parquet").read()
    assert (read.encoder, read.removed) == ("digest", "camera")
    assert read.group_names == names.tolist()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"labels": np.full(60, 3)}, "labels from 3 to 3 are no numbers of 3 classes"),
        ({"labels": np.full(60, -2)}, "labels from -2 to -2 are no numbers"),
        ({"labels": np.zeros(60)}, "are no numbers of 3 classes"),
        ({"labels": np.zeros(59, int)}, "60 vectors, but 59 labels"),
        ({"paths": ["a"]}, "60 vectors, but 1 paths"),
        ({"vectors": torch.zeros(60, 8)}, "give one of NumPy"),
        ({"labels": [0] * 60}, "the labels are no array"),
        ({"groups": [*range(60)]}, "the groups are no array"),
    ],
)
def test_columns_of_features_that_do_not_fit_are_refused(columns, message):
    given = {"vectors": FEATURES.vectors, "labels": FEATURES.labels, "classes": ("a", "b", "c")}
    with pytest.raises(UsageError, match=message):
        Embeddings(**given | columns)


def test_a_mask_chooses_the_same_images_as_their_rows():
    mask = FEATURES.labels == 1
    by_mask, by_rows = FEATURES.subset(mask), FEATURES.subset(np.flatnonzero(mask))
    assert by_mask.paths == by_rows.paths == tuple(f"{n:02}.png" for n in range(1, 60, 3))
    assert by_mask.records()[3]["path"] == "10.png"
    assert FEATURES.subset([4, 2]).paths == ("04.png", "02.png")
    assert (len(FEATURES.subset([])), FEATURES.subset([]).paths) == (0, ())


def test_groups_of_features_count_without_paths():
    """Three images of each group are alike, so that they are right or wrong together."""
    vectors, labels = (np.repeat(x[:20], 3, axis=0) for x in (FEATURES.vectors, FEATURES.labels))
    groups, splits = np.arange(60) // 3, np.repeat(["train", "test"], 30)
    grouped = Embeddings(vectors, labels, groups=groups, splits=splits)
    assert len(set(grouped.named_groups) - {""}) == 20
    named = replace(grouped, group_names=["", "", "ann", "", "bob", "", *[""] * 54])
    assert named.named_groups[:7] == ["ann"] * 3 + ["bob"] * 3 + ["2"]
    (metric, *_) = nearkin.evaluate(grouped, protocol=["knn"], verbose=False).metrics["encoder"]
    assert (metric.n, metric.effective_n) == (30, pytest.approx(10, abs=2))
    assert "independent" not in metric.protocol["interval"]


def test_options_of_an_encoder_are_refused_where_features_are_stored(trained_run, tmp_path):
    file = tmp_path / "f.parquet"
    write_embeddings(file, FEATURES)
    for call in (
        lambda how: nearkin.select(FEATURES, num=2, **how),
        lambda how: nearkin.select(trained_run, num=2, **how),
        lambda how: nearkin.select(file, num=2, **how),
        lambda how: nearkin.duplicates("digits", vectors=file, threshold=0.9, **how),
        lambda how: nearkin.duplicates("digits", **how),
        lambda how: nearkin.audit(file, **how),
        lambda how: nearkin.evaluate(file, **how),
    ):
        for how in ({"image_size": 64}, {"allow_partial": True}):
            with pytest.raises(UsageError, match=next(iter(how))):
                call(how)


def test_select_refuses_features_of_another_encoder_or_of_other_images(
    trained_run, digits_file, tmp_path
):
    file = tmp_path / "f.parquet"
    nearkin.embed(trained_run, digits_file, output=file, **QUIET)
    other = nearkin.load(trained_run)
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    with pytest.raises(nearkin.errors.CheckpointError, match="is of another encoder"):
        nearkin.select(other, digits_file, num=2, vectors=file, verbose=False)
    with pytest.raises(DataError, match="are not among these"):
        nearkin.select(
            trained_run, fill(tmp_path / "few", "a.png"), num=2, vectors=file, verbose=False
        )
    assert len(nearkin.select(trained_run, digits_file, num=2, vectors=file).paths) == 2


def test_numbers_of_numpy_stay_numbers_in_results():
    threshold = np.percentile([0.9, 0.99], 50)
    pixels = np.random.default_rng(0).integers(0, 256, (60, 9, 9, 3), np.uint8)
    named = Embeddings(FEATURES.vectors, FEATURES.labels, paths=[f"{n:02}" for n in range(60)])
    found = nearkin.duplicates(pixels, vectors=named, threshold=threshold, verbose=Silent())
    assert found.to_dict()["threshold"] == pytest.approx(0.945)


def test_labels_that_are_no_list_are_one_line():
    pixels = np.zeros((3, 9, 9), np.uint8)
    for labels in ({0: "a"}.values(), (each for each in "abc"), "abc", 5, {"a", "b", "c"}):
        with pytest.raises(DataError, match="give a list or an array"):
            nearkin.check((pixels, labels), verbose=False)


def test_what_is_typed_takes_precedence_over_what_excludes_it_in_a_file(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)  # the run folder has its usual name
    file = tmp_path / "settings.toml"
    file.write_text('epochs = 3\nlars_form = "simclr"\noptimizer = "lars"\n')
    words = ["--config", file, "--max-time", "5m", "--optimizer", "adamw"]
    assert run("train", tmp_path / "gone", *words) == 3
    assert "no such file" in capsys.readouterr().err
    assert run("train", tmp_path / "gone", "--epochs", "3", "--max-time", "5m") == 2
    assert run("train", tmp_path / "gone", "--lars-form", "byol", "--optimizer", "adamw") == 2
    stop = ["--on-collapse", "stop", "--evaluate-every", "0"]
    assert run("train", tmp_path / "gone", *stop) == 2


@pytest.mark.parametrize(
    ("stored", "typed", "left_out"),
    [
        ({"epochs": 3}, {"max_time": "5m"}, ["epochs"]),
        ({"epochs": 3, "mode": "gcd"}, {"max_time": "5m"}, []),
        ({"max_time": "2h", "mode": "gcd"}, {"epochs": 3}, []),
        ({"method": "moco", "max_time": "2h"}, {"accept": "run"}, ["method", "max_time"]),
        ({"encoder": "run", "mode": "gcd"}, {"devices": 2}, ["encoder"]),
        ({"mode": "ncd", "options": {"queue_size": 8}}, {"mode": "gcd"}, ["options"]),
        ({"backbone": "small"}, {"encoder": "run"}, ["backbone"]),
        ({"encoder": "run", "backbone": "small"}, {"backbone": "small"}, []),
        ({"method": "moco", "options": {"queue_size": 8}}, {"method": "simclr"}, ["options"]),
        ({"method": "moco", "options": {"queue_size": 8}}, {"method": "moco"}, []),
        ({"options": {"queue_size": 8}}, {"method": "moco"}, []),
        ({"lars_form": "simclr"}, {"optimizer": "adamw"}, ["lars_form"]),
        ({"lars_form": "simclr"}, {"optimizer": "lars"}, []),
        ({"optimizer": "lars"}, {"lars_form": "simclr"}, []),
        ({"chunk_size": 8}, {"fsdp": True}, ["chunk_size"]),
        ({"chunk_size": 8}, {"fsdp": False}, []),
        ({"grad_checkpointing": True}, {"compile": "graphs"}, ["grad_checkpointing"]),
        ({"grad_checkpointing": True}, {"compile": "off"}, []),
        ({"compile": "off"}, {"grad_checkpointing": True}, []),
        ({"lr_milestones": [0.5]}, {"cosine_end": 0.1}, ["lr_milestones"]),
        ({"lr_milestones": []}, {"cosine_end": 0.1}, []),
        ({"labeled": "some"}, {"known": ["a"]}, ["labeled"]),
        ({"accept": "run"}, {"labeled": "some"}, []),
    ],
)
def test_of_a_file_only_what_contradicts_what_is_typed_is_left_out(stored, typed, left_out):
    of_discovery = {"known", "labeled", "accept", "mode"} & {*stored, *typed}
    kind = DiscoverConfig if of_discovery else TrainConfig
    assert [*excluded(kind, stored, typed)] == left_out


def test_what_is_left_out_of_a_file_is_said_and_the_rest_of_it_checked(tmp_path, capsys):
    file, gone = tmp_path / "settings.toml", tmp_path / "gone"
    file.write_text('epochs = 3\nlars_form = "none"\nignore = "exif:Model"\n')
    typed = ["--max-time", "5m", "--optimizer", "lars"]
    assert run("train", gone, "--config", file, *typed) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"left out: --epochs 3 of {file}, as --max-time excludes it"
    assert "--lars-form none" in said[1]
    file.write_text('method = "simclr"\n[options]\ntemperature = 0.2\nlast_norm = false\n')
    to = "-o", tmp_path / "run", "-q"
    assert run("train", gone, "--config", file, "--method", "moco", *to) == 3
    (line, _) = capsys.readouterr().err.splitlines()
    left = "--temperature 0.2 --last-norm false"
    assert line == f"left out: {left} of {file}, as --method excludes them"
    file.write_text(f'accept = "{tmp_path / "no run"}"\n')
    assert run("discover", gone, "--config", file, "--labeled", gone) == 2
    assert "no run is no finished discovery; --accept wants one" in capsys.readouterr().err


def test_more_processes_than_gpus_are_refused_before_the_images_are_read(tmp_path, refusal):
    says = "--devices 2 takes 2 GPUs, and --device meta has 1; give --devices 1, or --device cpu"
    words = [tmp_path / "gone", "--device", "meta", "--devices", 2, "-o", tmp_path / "run"]
    assert says in refusal(2, "train", *words)
    assert says in refusal(2, "discover", *words, "--labeled", tmp_path)
    check_gpus(torch.device("cpu"), 1024)
    check_gpus(torch.device("mps"), 1)
    there = torch.cuda.device_count()
    for name, num in ("mps", 1), ("cuda:1", 1), ("cuda", there):
        with pytest.raises(UsageError, match=f"device {name} has {num}"):
            check_gpus(torch.device(name), num + 1)


def test_what_code_of_the_user_ends_with_is_said(tmp_path, capsys):
    images, file = tmp_path / "images.npz", tmp_path / "mine.py"
    np.savez(images, x=np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8))
    file.write_text("import sys\n\n\ndef network():\n    sys.exit('no weights')\n")
    words = ["--backbone", f"{file}:network", "--batch-size", 16, "--workers", 0]
    assert run("train", images, *words, "--epochs", 1, "-o", tmp_path / "run", "-q") == 1
    assert capsys.readouterr().err == "error: no weights\n"


def test_the_features_of_a_run_are_vectors(trained_run, digits_file, tmp_path):
    file = tmp_path / "f.parquet"
    nearkin.embed(trained_run, digits_file, output=file, **QUIET)
    for vectors in (trained_run, file):
        found = nearkin.duplicates(digits_file, vectors=vectors, threshold=0.9999, verbose=False)
        assert found.threshold == 0.9999
        image = fill(tmp_path / "query", "a.png") / "a.png"
        assert nearkin.neighbors(trained_run, image, vectors=vectors, top=1)
    (tmp_path / "f.npz").touch()
    with pytest.raises(UsageError, match="is no table of features"):
        nearkin.duplicates(digits_file, vectors=tmp_path / "f.npz", threshold=0.9)
    with pytest.raises(UsageError, match="has no images of its own"):
        nearkin.neighbors(Path(trained_run) / "encoder.safetensors", image)


def test_an_option_without_an_effect_is_refused(trained_run, refuses):
    commands = (
        ("export RUN --format atlas --dynamic-size -o a.parquet", 2, "of grap"),
        ("export RUN --format atlas --license MIT -o a.parquet", 2, "place"),
        ("export RUN --format torchvision --license MIT -o e.pth", 2, "no place"),
        ("doctor --device bogus", 2, "device bogus"),
        ("neighbors RUN a.png --data gone", 2, "--data is shown on a sheet"),
        ("classify RUN digits --augment simclr", 2, "--augment is of fine-tuning"),
        ("classify RUN digits --save-every 3", 2, "--save-every is of fine-tuning"),
        ("explore RUN --write --port 8000", 2, "--port is of serving"),
        ("explore RUN -o x.html --i-know", 2, "--i-know is of serving"),
        ("explore RUN --one-file 9", 2, "--one-file is of a page that is written"),
        ("explore RUN --overwrite", 2, "--overwrite is of a page that is written"),
    )
    refuses(commands, RUN=trained_run)


def test_evaluate_measures_what_can_be_read_however_much_cannot(trained_run, tmp_path, capsys):
    fill(tmp_path, *(f"{c}/{n}.png" for c in "ab" for n in range(6)))
    for n in range(8):
        (tmp_path / f"a/bad{n}.png").write_text("no image")
    assert run("evaluate", Path(trained_run) / "encoder.safetensors", tmp_path) == 0
    assert "8 of 20 images, which cannot be read" in capsys.readouterr().err
