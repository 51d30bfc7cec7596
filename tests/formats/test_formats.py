"""What every release has written is read, and computes what it did; later formats are refused.

An archive here holds what one release wrote by make.py, and is never written again.
"""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from nearkin_command import run as call
from safetensors import safe_open
from safetensors.torch import save_file

import nearkin
from nearkin.errors import CheckpointError, UsageError
from nearkin.run.folder import RunFolder

HERE = Path(__file__).parent
RELEASES = sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("*.tar.xz"))
KINDS = {"train": "training", "discover": "discovery", "classify": "classification"}
CLOSE = {"rtol": 1e-3, "atol": 1e-4}  # other machines and versions of torch round otherwise


@pytest.fixture(params=RELEASES)
def release(request, tmp_path):
    """What a release wrote."""
    with tarfile.open(HERE / f"{request.param}.tar.xz") as packed:
        packed.extractall(tmp_path / request.param, filter="data")
    return tmp_path / request.param


@pytest.fixture
def expected(release):
    with np.load(release / "expected.npz") as file:
        return {name: file[name] for name in file.files}


def test_this_release_is_among_those_that_are_kept():
    assert nearkin.__version__ in RELEASES, "python tests/formats/make.py"


def test_an_encoder_computes_its_features(release, expected):
    encoder = nearkin.load(release / "train")
    pixels = np.load(release / "images.npz")["x"]
    with torch.inference_mode():
        features = torch.cat([encoder(encoder.transform(image)[None]) for image in pixels])
    np.testing.assert_allclose(features, expected["features"], **CLOSE)


@pytest.mark.parametrize("kind", ["discover", "classify"])
def test_a_classifier_assigns_the_classes_that_it_did(release, expected, kind):
    rows = nearkin.predict(release / kind, release / "images.npz").to_dict()["images"]
    assert [row["cluster"] for row in rows] == expected[f"{kind}_classes"].tolist()
    scores = [row["score"] for row in rows]
    np.testing.assert_allclose(scores, expected[f"{kind}_scores"], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_folder_is_read_and_its_page_is_written_again(release, kind):
    folder = RunFolder(release / kind)
    assert folder.kind == KINDS[kind]
    folder.any_settings()
    assert folder.read_summary()
    assert nearkin.explore(folder.path, release / "images.npz", write=True) == folder.report
    assert folder.report.stat().st_size > 10_000


def test_a_run_is_measured_and_compared(release, capsys):
    run, data = release / "train", release / "images.npz"
    assert call("evaluate", run, data, "--features=embedding", "--protocol=knn", "--json") == 0
    assert "embedding" in capsys.readouterr().out
    shutil.copytree(run, release / "again")
    assert call("compare", run, release / "again") == 0


def test_the_settings_of_a_run_are_a_configuration(release, tmp_path):
    # In bf16 the gradient of this network's last depthwise convolution may not be finite: its
    # kernel reads memory that nobody has written (docs/reliability.md, "Not guaranteed").
    typed = ["-o", tmp_path / "again", "--epochs=1", "--quiet", "--precision=fp32"]
    config = release / "train" / "config.toml"
    assert call("train", release / "images.npz", "--config", config, *typed) == 0


def with_format(path, version, key):
    """Rewrite a file of tensors as of another format."""
    with safe_open(path, framework="pt") as file:
        noted = json.loads(file.metadata()[key])
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(state, path, {key: json.dumps(noted | {"format": version})})


def test_a_later_format_is_refused_with_those_that_are_read(release):
    images = release / "images.npz"
    with_format(release / "classify" / "classifier.safetensors", "99", "nearkin")
    with pytest.raises(CheckpointError, match=r"of format 99, nearkin .* reads 3\)"):
        nearkin.predict(release / "classify", images)
    with_format(release / "train" / "projector.safetensors", "99", "projector")
    with pytest.raises(CheckpointError, match=r"of format 99, nearkin .* reads 1\)"):
        nearkin.evaluate(release / "train", images, features="embedding")
    with_format(release / "train" / "encoder.safetensors", "99", "nearkin")
    with pytest.raises(CheckpointError, match=r"of format 99, nearkin .* reads 1 and 2 and 3\)"):
        nearkin.load(release / "train")
    config = release / "discover" / "config.toml"
    config.write_text(config.read_text().replace("format = 1\n", 'format = 99\nlater = "x"\n'))
    with pytest.raises(UsageError, match=r"of format 99, nearkin .* reads 1; take the release"):
        RunFolder(release / "discover").any_settings()
