"""No file is unpickled, wherever weights, images, labels or a part of a run may lie."""

import ast
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from hostile import PACKAGE, PICKLE, THEIRS, Commands, Runs, folder_of, run_of, work_place, zipped

from nearkin.config import TrainConfig
from nearkin.tables import write_sealed


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return work_place(tmp_path_factory.mktemp("pickles"))


def weights(**more):
    """A checkpoint that holds what is asked for, and a pickle that acts."""
    state = {"conv1.weight": torch.zeros(64, 3, 7, 7), **more}
    return zipped({"state_dict": state, "x": Runs()}), zipped({**state, "x": Runs()})


def objects():
    array = np.empty(1, object)
    array[0] = Runs()
    return array


def npz(file, /, **arrays):
    np.savez(file, **arrays, allow_pickle=True)


def add_libraries(commands, place):
    """Where torchvision, timm and transformers look for weights."""
    nested, flat = weights()
    cache = place / "torch" / "hub" / "checkpoints"
    url = torchvision.models.ResNet18_Weights.DEFAULT.url
    by_url = timm.get_pretrained_cfg("gcvit_xxtiny.in1k").url
    folder_of(cache, {Path(url).name: flat, Path(by_url).name: flat})
    hub = place / "hf" / "hub" / f"models--timm--{'resnet18.a1_in1k'}"
    folder_of(hub, {"refs/main": "0123abc", "snapshots/0123abc/pytorch_model.bin": flat})
    old = zipped({"x": Runs()}, _use_new_zipfile_serialization=False)
    timms = json.dumps({"architecture": "resnet18", "num_classes": 0})
    theirs = json.dumps({"model_type": "resnet", "depths": [1], "hidden_sizes": [8]})
    for name, config in {"timm": timms, "transformers": theirs}.items():
        for kind, content in {"new": flat, "old": old, "bare": PICKLE}.items():
            folder_of(place / f"{name}-{kind}",
                      {"config.json": config, "pytorch_model.bin": content})  # fmt: skip
    index = json.dumps({"metadata": {}, "weight_map": {"x": "part.bin"}})
    parts = {"config.json": theirs, "pytorch_model.bin.index.json": index, "part.bin": flat}
    folder_of(place / "transformers-parts", parts)
    folders = [path.name for path in place.glob("t*-*") if path.is_dir()]
    assert len(folders) == 7
    for suffix in ("bin", "pth", "safetensors"):
        files = {"nested": nested, "flat": flat, "old": old, "bare": PICKLE}
        folder_of(place, {f"{name}.{suffix}": content for name, content in files.items()})
        folders += [f"{start}{name}.{suffix}" for name in files for start in ("", "resnet18@")]
    for source in ["torchvision:resnet18", "timm:gcvit_xxtiny.in1k", "timm:resnet18.a1_in1k"]:
        commands.add(f"weights: {source}", "embed", source, "images", "-o", "x.npz")
    for source in folders:
        commands.add(f"weights: {source}", "embed", source, "images", "-o", "x.npz")


def add_runs_of_pickles(commands, place):
    """Files of a run; a checkpoint has a checksum, which anybody can compute."""
    settings = TrainConfig(init_from="good", method="seed", teacher="good", augment="simclr")
    sound = (place / "good" / "encoder.safetensors").read_bytes()
    for file in ("encoder", "classifier", "projector", "start", "teacher"):
        run = run_of(place, f"pickled-{file}", settings)
        folder_of(place / run, {"start.safetensors": sound, "teacher.safetensors": sound})
        folder_of(place / run, {f"{file}.safetensors": PICKLE})
        features = "embedding" if file == "projector" else "backbone"
        using = (
            ["assign", run] if file == "classifier" else ["evaluate", run, "--features", features]
        )
        commands.add(f"run: {file}", *using, "images")
    run = run_of(place, "pickled", settings)
    folder_of(place / run, {"summary.json": PICKLE, "map.npz": PICKLE, "data.json": PICKLE})
    folder_of(place / run, {"embeddings.parquet": PICKLE})
    for verb in ("report", "replay", "export"):
        commands.add(f"run: {verb}", verb, run)
    train = ["train", "images", "-o", "resumed", "--epochs", 1, "--batch-size", 4]
    train += ["--backbone", "tiny", "-q", "--no-report"]
    commands.add("warm: a run to be resumed", *train)
    return [*train, "--resume"]


def add_data(commands, place):
    """Images, tables and vectors."""
    npz(place / "objects.npz", x=objects())
    npz(place / "labels.npz", x=np.zeros((4, 8, 8, 3), np.uint8), y=objects())
    npz(place / "vectors.npz", path=objects(), vector=np.ones((1, 4), np.float32))
    np.save(place / "array.npy", objects(), allow_pickle=True)
    suffixes = ("npz", "npy", "csv", "parquet", "arrow", "zip", "tar", "tar.gz", "tgz", "png")
    folder_of(place / "data", {f"pickle.{suffix}": PICKLE for suffix in suffixes})
    script = f"{THEIRS}\nimport datasets\n"
    info = json.dumps({"builder_name": "theirs", "features": {"image": {"_type": "theirs.Net"}}})
    folder_of(place / "hub", {"hub.py": script, "dataset_info.json": info, "state.json": info,
                              "data-00000-of-00001.arrow": PICKLE})  # fmt: skip
    data = ["objects.npz", "labels.npz", "hub", *(f"data/pickle.{each}" for each in suffixes)]
    for name in data:
        commands.add(f"data: {name}", "check", name)
        commands.add(f"labels: {name}", "train", "images", "--labels", name, "-o", "z")
        commands.add(f"labeled: {name}", "classify", "images", "--labeled", name, "--from", "good")
    for name in ("vectors.npz", "array.npy", "data/pickle.npz", "data/pickle.parquet"):
        commands.add(f"vectors: {name}", "evaluate", name)
        commands.add(f"search: {name}", "neighbors", "good", "images/a/a0.png", "--in", name)


@pytest.fixture(scope="module")
def pickled(place):
    commands = Commands(place)
    commands.add("warm: embed", "embed", "good", "images", "-o", "x.npz")
    resume = add_runs_of_pickles(commands, place)
    add_libraries(commands, place)
    add_data(commands, place)
    answers = commands.run()
    kept = list((place / "resumed" / "checkpoints").glob("ckpt-*.pt"))
    for checkpoint in kept:
        write_sealed(checkpoint, zipped({"step": 1, "x": Runs()}))
    (place / "resumed" / "summary.json").unlink()
    again = Commands(place)
    again.add("warm: once more", "embed", "good", "images", "-o", "x.npz")
    again.add("run: resumed", *resume)
    assert kept
    return answers | again.run()


def test_no_file_is_unpickled(pickled, place):
    assert not (place / "marker").exists()
    ended = {name: answer.line for name, answer in pickled.items() if not name.startswith("warm")}
    assert [name for name, line in ended.items() if not line] == []
    for file in ("encoder", "classifier", "projector", "start", "teacher"):
        assert f"{file}.safetensors cannot be used" in ended[f"run: {file}"]
    events = {name: answer.events for name, answer in pickled.items() if "warm" not in name}
    assert {name: each for name, each in events.items() if each} == {}
    weights = {name for name in ended if name.startswith("weights")}
    assert {name: pickled[name].code for name in weights} == dict.fromkeys(weights, 5)
    hashed = ended["weights: torchvision:resnet18"]
    assert re.search(r"resnet18-f37072fd\.pth is not the file of its name: its SHA-256", hashed)
    assert "resnet18-f37072fd" in hashed
    assert "downloaded again" not in ended["weights: timm-new"]


# ---------------------------------------------------------------- what the package may use


MAY_RUN_CODE = {
    "builtins", "cloudpickle", "code", "ctypes", "dill", "joblib", "marshal", "pickle", "pty",
    "runpy", "shelve", "subprocess", "torch.hub", "torch.jit", "torch.package", "yaml",
}  # fmt: skip
EXCEPT = {
    "encoders/downloads.py": {"torch.hub"},
    "training/loop.py": {"ctypes"},
    "evaluation/ray_parts.py": {"subprocess"},
}
"""One downloads, and reads nothing; one tells the C library when to keep memory, by two functions
it names itself; one starts this Python anew, as Ray's driver."""
CALLS = {"__import__", "compile", "os.popen", "os.startfile", "shutil.unpack_archive"}
LOADERS = {"load", "open_memmap", "read_array"}


def breaches(path):
    """What a module imports or calls that could run what a file says, beside `EXCEPT`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
            heavy = str(node.module).split(".")[0] in ("torch", "numpy")
            yield from LOADERS & {alias.name for alias in node.names} if heavy else ()
            yield from imported - {"os", "os.path"} if node.module == "os" else ()
        elif isinstance(node, ast.Call):
            name, imported = ast.unparse(node.func), set()
            if name in CALLS or re.match(r"os\.(exec|spawn|posix_spawn|system)", name):
                yield name
            if name in ("torch.load", "np.load", "numpy.load") and len(node.args) != 1:
                yield f"{name} with an option without a name, which no lint sees"
            if name == "get_state_dict" or name.endswith(".get_state_dict"):
                yield f"{name}, which unpickles"
        else:
            continue
        yield from MAY_RUN_CODE & imported - EXCEPT.get(
            path.relative_to(PACKAGE).as_posix(), set()
        )


def test_nothing_is_imported_that_could_run_what_a_file_says():
    """Beside `test_architecture`, which forbids the calls: no import gives them another name."""
    modules = sorted(PACKAGE.rglob("*.py"))
    assert len(modules) > 150
    found = {str(path.relative_to(PACKAGE)): list(breaches(path)) for path in modules}
    assert {path: each for path, each in found.items() if each} == {}


LEAST = {
    "torch": (2, 10),  # CVE-2026-24747: memory corruption by weights_only loading
    "Pillow": (12, 3),
    "timm": (1, 0, 26),  # earlier ones unpickle the pytorch_model.bin of a folder
}


def test_releases_with_known_holes_are_not_accepted():
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    for package, least in LEAST.items():
        (demand,) = [d for d in project["dependencies"] if re.match(rf"{package}\b", d)]
        stated = re.search(r">=\s*([\d.]+)", demand)[1]
        assert tuple(map(int, stated.split("."))) >= least, demand
