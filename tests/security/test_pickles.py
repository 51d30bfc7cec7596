"""No file is unpickled, wherever weights, images, labels or a part of a run may lie."""

import ast
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import timm
import torch
import torchvision
from hostile import (
    PACKAGE,
    PICKLE,
    REFUSED,
    THEIRS,
    Runs,
    answers_to,
    assert_harmless,
    folder_of,
    run_of,
    work_place,
    zipped,
)
from nearkin_command import run as command_line

from nearkin.config import TrainConfig
from nearkin.files import write_sealed

NOT_OF_ITS_NAME = "resnet18-f37072fd.pth is not the file of its name: its SHA-256"


def weights():
    """A checkpoint that holds what is asked for, and a pickle that acts: with a name, and flat."""
    state = {"conv1.weight": torch.zeros(64, 3, 7, 7)}
    return zipped({"state_dict": state, "x": Runs()}), zipped({**state, "x": Runs()})


def objects():
    array = np.empty(1, object)
    array[0] = Runs()
    return array


def sources(place):
    """Where torchvision, timm and transformers look for weights."""
    nested, flat = weights()
    urls = (
        torchvision.models.ResNet18_Weights.DEFAULT.url,
        timm.get_pretrained_cfg("gcvit_xxtiny.in1k").url,
    )
    folder_of(place / "torch" / "hub" / "checkpoints", {Path(url).name: flat for url in urls})
    hub = place / "hub" / "models--timm--resnet18.a1_in1k"
    folder_of(hub, {"refs/main": "0123abc", "snapshots/0123abc/pytorch_model.bin": flat})
    for name in ("torchvision:resnet18", "timm:gcvit_xxtiny.in1k", "timm:resnet18.a1_in1k"):
        says = NOT_OF_ITS_NAME if name == "torchvision:resnet18" else "error: "
        yield f"weights: {name}", {}, f"embed {name} images -o x.npz --overwrite", {5}, says
    old = zipped({"x": Runs()}, _use_new_zipfile_serialization=False)
    timms = json.dumps({"architecture": "resnet18", "num_classes": 0})
    theirs = json.dumps({"model_type": "convnextv2", "depths": [1], "hidden_sizes": [8]})
    index = json.dumps({"metadata": {}, "weight_map": {"x": "part.bin"}})
    folders = {
        f"{name}-{kind}": {"config.json": config, "pytorch_model.bin": content}
        for name, config in {"timm": timms, "transformers": theirs}.items()
        for kind, content in {"new": flat, "old": old, "bare": PICKLE}.items()
    }
    folders["transformers-parts"] = {
        "config.json": theirs, "pytorch_model.bin.index.json": index, "part.bin": flat
    }  # fmt: skip
    for name, files in folders.items():
        yield f"weights: {name}", files, "embed HERE images -o x.npz --overwrite", {5}, "error: "
    for name, content in {"nested": nested, "flat": flat, "old": old, "bare": PICKLE}.items():
        for suffix in ("bin", "pth", "safetensors"):
            for start in ("", "resnet18@"):
                command = f"embed {start}HERE/x.{suffix} images -o x.npz --overwrite"
                what = f"weights: {start}{name}.{suffix}"
                yield what, {f"x.{suffix}": content}, command, {5}, "error: "


def runs(place):
    """Files of a run; a checkpoint has a checksum, which anybody can compute."""
    settings = TrainConfig(encoder="good", method="seed", teacher="good", augment="simclr")
    sound = (place / "good" / "encoder.safetensors").read_bytes()
    run = run_of(settings) | {"start.safetensors": sound, "teacher.safetensors": sound}
    for file in ("encoder", "classifier", "projector", "start", "teacher"):
        features = "embedding" if file == "projector" else "backbone"
        evaluate = f"evaluate HERE --features {features} images"
        command = "predict HERE images" if file == "classifier" else evaluate
        says = f"{file}.safetensors cannot be used"
        yield f"run: {file}", {**run, f"{file}.safetensors": PICKLE}, command, REFUSED, says
    for file in ("summary.json", "map.npz", "data.json", "embeddings.parquet"):
        run[file] = PICKLE
    for verb in ("explore", "doctor", "export --format atlas"):
        yield f"run: {verb}", run, f"{verb} HERE", REFUSED, "error: "
    train = f"train {place}/images -o {place}/resumed --epochs 1 --batch-size 4 --val 0"
    train += " --backbone tiny -q"
    assert command_line(*train.split()) == 0
    kept = list((place / "resumed" / "checkpoints").glob("ckpt-*.pt"))
    assert kept
    for checkpoint in kept:
        write_sealed(checkpoint, zipped({"step": 1, "x": Runs()}))
    (place / "resumed" / "summary.json").unlink()
    yield "run: resumed", {}, f"{train} --resume", REFUSED, "error: "


def data(place):
    """Images, tables and vectors."""
    arrays = {
        "objects.npz": {"x": objects()},
        "labels.npz": {"x": np.zeros((4, 8, 8, 3), np.uint8), "y": objects()},
        "vectors.npz": {"path": objects(), "vector": np.ones((1, 4), np.float32)},
    }
    for name, each in arrays.items():
        np.savez(place / name, **each, allow_pickle=True)
    np.save(place / "array.npy", objects(), allow_pickle=True)
    suffixes = ("npz", "npy", "csv", "parquet", "arrow", "zip", "tar", "tar.gz", "tgz", "png")
    folder_of(place / "data", {f"pickle.{suffix}": PICKLE for suffix in suffixes})
    info = json.dumps({"builder_name": "theirs", "features": {"image": {"_type": "theirs.Net"}}})
    folder_of(place / "set", {"set.py": f"{THEIRS}\nimport datasets\n", "dataset_info.json": info,
                              "state.json": info, "data-00000-of-00001.arrow": PICKLE})  # fmt: skip
    named = ["objects.npz", "labels.npz", "set", *(f"data/pickle.{each}" for each in suffixes)]
    commands = [
        f"{verb} {name}" for name in named for verb in ("check", "train images -o z --labels")
    ]
    commands += [f"classify good images --labeled {name}" for name in named]
    for name in ("vectors.npz", "array.npy", "data/pickle.npz", "data/pickle.parquet"):
        commands += [f"evaluate {name}", f"neighbors good images/a/a0.png --vectors {name}"]
    for command in commands:
        yield command, {}, command, REFUSED, "error: "


def test_no_file_is_unpickled(tmp_path):
    place = work_place(tmp_path)
    cases = [("warm", {}, "embed good images -o x.npz --overwrite", {0}, "")]
    cases += [*runs(place), *sources(place), *data(place)]
    answers = answers_to(place, cases)
    assert_harmless(place, cases, answers)
    assert "downloaded again" not in answers["weights: timm-new"].line


MAY_RUN_CODE = {
    "builtins", "cloudpickle", "code", "ctypes", "dill", "joblib", "marshal", "pickle", "pty",
    "runpy", "shelve", "subprocess", "torch.hub", "torch.jit", "torch.package", "yaml",
}  # fmt: skip
EXCEPT = {
    "encoders/origin.py": {"torch.hub"},
    "distributed/allocation.py": {"ctypes"},
    "evaluation/ray_shards.py": {"subprocess"},
}
"""One downloads, and reads nothing; one tells the C library when to keep memory, by two functions
it names itself; one starts this Python anew, as Ray's driver."""
CALLS = {
    "__import__", "compile", "eval", "exec", "os.popen", "os.startfile", "shutil.unpack_archive",
    "torch.jit.load",
}  # fmt: skip
LOADERS = {"load", "open_memmap", "read_array"}


def unsafe(call):
    """What a call could run, or unpickle."""
    name = ast.unparse(call.func)
    told = [
        keyword for keyword in call.keywords if keyword.arg in ("allow_pickle", "weights_only")
    ]
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in told}
    if name in CALLS or re.match(r"os\.(exec|spawn|posix_spawn|system)|.*\.extractall$", name):
        yield name
    if given.get("allow_pickle", "False") != "False":
        yield f"{name} that may unpickle"
    if name == "torch.load" and given.get("weights_only") != "True":
        yield f"{name} of more than weights"
    if name in ("torch.load", "np.load", "numpy.load") and len(call.args) != 1:
        yield f"{name} with an option without a name, which no lint sees"
    if name == "get_state_dict" or name.endswith(".get_state_dict"):
        yield f"{name}, which unpickles"


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
            imported = set()
            yield from unsafe(node)
        else:
            continue
        yield from MAY_RUN_CODE & imported - EXCEPT.get(
            path.relative_to(PACKAGE).as_posix(), set()
        )


def test_nothing_is_called_or_imported_that_could_run_what_a_file_says():
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
