"""`nearkin.sklearn.SelfSupervisedEncoder` among other estimators."""

import subprocess
import sys
import tomllib

import numpy as np
import pytest
import torch
from builders import digit_pixels, write_network
from discoveries import rows, save
from processes import environment
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from torch import nn

import nearkin
from nearkin.errors import DataError
from nearkin.sklearn import NovelClassDiscovery, PretrainedEncoder, SelfSupervisedEncoder

QUICK = {"epochs": 1, "device": "cpu", "random_state": 0, "settings": {"workers": 0}}

CHECKS = """
from sklearn.utils.estimator_checks import check_estimator
from nearkin.sklearn import PretrainedEncoder, SelfSupervisedEncoder

# Rows of any length are images one pixel high.
settings = {"workers": 0, "evaluate_every": 0}
quick = {"epochs": 1, "device": "cpu", "settings": settings}
if name == "trained":
    strips = SelfSupervisedEncoder(backbone="tiny", image_shape=(1, -1), **quick)
else:
    strips = PretrainedEncoder(name, image_shape=(1, -1), device="cpu")
for check in check_estimator(strips, on_fail=None, on_skip=None):
    print(check["check_name"], check["status"], check["exception"] or "", sep=": ")
"""


@pytest.mark.parametrize("kind", [pytest.param("trained", marks=pytest.mark.slow), "pretrained"])
def test_every_check_of_scikit_learn_passes(kind, tmp_path):
    """In a process without the type checks of the tests: one check passes wrong types."""
    name = kind if kind == "trained" else str(write_network(tmp_path / "encoder.safetensors"))
    command = [sys.executable, "-W", "error", "-c", f"name = {name!r}\n{CHECKS}"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, env=environment()
    )
    assert done.returncode == 0, done.stderr
    results = [line.split(": ", 2) for line in done.stdout.splitlines()]
    assert len(results) > 40
    # Only what is optional is skipped: arrays of other libraries, which are not claimed.
    assert {name for name, status, _ in results if status != "passed"} == {"check_array_api_input"}


@pytest.fixture(scope="module")
def digits():
    images, labels = load_digits(return_X_y=True)
    return images[:120], labels[:120]


def test_flattened_images_are_those_that_they_were(digits):
    flat, _ = digits
    square = flat.reshape(-1, 8, 8)
    one = SelfSupervisedEncoder(backbone="tiny", image_shape=(8, 8), **QUICK).fit(flat)
    other = SelfSupervisedEncoder(backbone="tiny", **QUICK).fit(square)
    features = one.transform(flat[:7])
    assert features.shape == (7, 128)
    assert np.linalg.norm(features, axis=1) == pytest.approx(1)
    assert (features == other.transform(square[:7])).all()
    assert not (features == one.transform(flat[:7] / 4)).all()  # darker than those it has seen
    assert (one.range_, one.n_features_in_) == ((0.0, 16.0), 64)
    assert one.get_feature_names_out()[-1] == "selfsupervisedencoder127"


def test_flattened_images_need_a_shape(digits):
    with pytest.raises(ValueError, match="rows of 64 numbers; give image_shape"):
        SelfSupervisedEncoder(**QUICK).fit(digits[0])


def test_a_grid_search_over_a_pipeline_chooses_a_method_and_its_options(digits):
    encoder = SelfSupervisedEncoder(backbone="tiny", image_shape=(8, 8), **QUICK)
    grid = {"method": ["simclr", "vicreg"], "batch_size": [30]}
    grid = {f"selfsupervisedencoder__{name}": values for name, values in grid.items()}
    search = GridSearchCV(make_pipeline(encoder, LogisticRegression()), grid, cv=2).fit(*digits)
    assert set(search.cv_results_["mean_test_score"] > 0.3) == {True}  # of ten classes
    assert search.best_estimator_.predict(digits[0][:3]).shape == (3,)


class Column(list):
    """A column of a table after a split: iterated by position and indexed by other numbers."""

    ndim = 1

    def __getitem__(self, row):
        return list(self)[len(self) - 1 - row]


def test_paths_are_read_in_their_order_though_some_are_there_twice(photographs, tmp_path):
    paths = [str(path) for path in sorted(photographs.iterdir())]
    encoder = SelfSupervisedEncoder(backbone="tiny", batch_size=4, **QUICK)
    settings = {"image_size": 16, "workers": 0, "val": 0.25}
    encoder.set_params(settings=settings, output=tmp_path / "run").fit(paths)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["val"] == 0.25
    backwards = encoder.transform([*paths[::-1], paths[3]])
    assert (backwards[:-1][::-1] == encoder.transform(paths)).all()
    assert (backwards[-1] == backwards[len(paths) - 4]).all()
    assert (nearkin.load(tmp_path / "run").num_features, encoder.n_features_in_) == (128, 1)
    column = Column([*paths, str(tmp_path / "other.png")])
    with pytest.raises(ValueError, match=r"cannot read .*other.png: .*; leave it out"):
        encoder.transform(column)
    with pytest.raises(ValueError, match=r"cannot read .*missing.png: .*; leave it out"):
        encoder.transform([paths[0], tmp_path / "missing.png"])


def test_a_network_and_options_of_ones_own_survive_a_clone(digits):
    network = nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1))
    options = {"temperature": 0.3, "queue_size": 60}
    encoder = SelfSupervisedEncoder(
        "moco", backbone=network, options=options, batch_size=30, **QUICK
    )
    fitted = clone(encoder).fit(digits[0].reshape(-1, 8, 8))
    assert fitted.transform(digits[0].reshape(-1, 8, 8)).shape == (120, 5)
    assert fitted.encoder_.details["method"] == "moco"


def test_a_pretrained_encoder_gives_the_features_that_embed_gives(digits, tmp_path):
    file = write_network(tmp_path / "encoder.safetensors")
    images = np.uint8(15 * digits[0]).reshape(-1, 8, 8)
    expected = nearkin.embed(file, images, workers=0, device="cpu", verbose=False)
    for encoder in (str(file), file, nearkin.load(file)):
        with torch.autocast("cpu", torch.bfloat16):
            found = clone(PretrainedEncoder(encoder, device="cpu")).fit_transform(images)
        np.testing.assert_array_equal(found, expected.vectors)


@pytest.fixture
def encoder(tmp_path):
    """An encoder of RGB of 8 bits that has learned nothing."""
    return PretrainedEncoder(str(write_network(tmp_path / "encoder.safetensors")), device="cpu")


def test_bytes_are_taken_as_they_are_and_after_them_no_fractions(encoder):
    """Images are neither black nor white because they come in another type than those of `fit`."""
    images = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    expected = clone(encoder).fit(images).transform(images)
    for fitted in (images / 255, images / 17, images.astype(np.uint16), images[:3] + 400.0):
        np.testing.assert_array_equal(clone(encoder).fit(fitted).transform(images), expected)
    of_bytes = clone(encoder).fit(images)
    for dtype in (np.int64, np.uint16, np.float32, np.float64):
        np.testing.assert_array_equal(of_bytes.transform(images.astype(dtype)), expected)
    whole = images.astype(np.int16)
    for wrong in (images / 255, images / np.float32(255), whole - 1, whole + 1, whole * 1e30):
        with pytest.raises(ValueError, match="of fit were uint8; give uint8, or whole numbers"):
            of_bytes.transform(wrong)


def test_images_that_cannot_be_used_are_a_value_error_in_one_line(encoder, finder, tmp_path):
    """Which is nearkin's own, too, as training promises."""
    images = np.zeros((8, 16, 16, 3), np.uint8)
    four, missing = np.zeros((8, 16, 16, 4), np.uint8), [str(tmp_path / "missing.png")] * 8
    (tmp_path / "bad.png").write_text("no image")
    fitted, y = clone(encoder).fit(images), np.arange(8) % 3 - 1
    channels, files = "4 channels of uint8, and the encoder takes RGB", "images can be used, such"
    for call, message in (
        (lambda: clone(encoder).fit(four), channels),
        (lambda: clone(encoder).fit(missing), files),
        (
            lambda: fitted.transform([tmp_path / "bad.png"]),
            f"none of 1 {files}.*text, not an image",
        ),
        (lambda: fitted.transform(missing), files),
        (lambda: SelfSupervisedEncoder(backbone="tiny", **QUICK).fit(missing), files),
        (lambda: clone(finder).fit(four, y), channels),
    ):
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert isinstance(error.value, DataError)
        assert "\n" not in str(error.value)


def test_novel_classes_are_found_among_images_without_a_label(tmp_path):
    """A network that has learned nothing tells black, white, red, green and blue apart."""
    truth, colors = np.arange(60) % 5, np.stack([np.zeros(3), np.ones(3), *np.eye(3)])
    images = np.tile(255 * colors[truth], 64)
    images = (images + np.random.default_rng(0).normal(0, 16, images.shape)).clip(0, 255)
    y = np.where((truth < 3) & (np.arange(len(truth)) % 2 == 0), truth, -1)
    encoder = nearkin.load(write_network(tmp_path / "encoder.safetensors"))
    settings = {"workers": 0}
    how = {"image_shape": (8, 8, 3), "epochs": 20, "device": "cpu", "settings": settings}
    finder = NovelClassDiscovery(2, encoder=encoder, random_state=0, **how)
    found = clone(finder).fit(images, y)
    assert found.classes_.tolist() == [0, 1, 2, 3, 4]
    predicted = found.predict(images)
    swapped = np.where(truth < 3, truth, 7 - truth)  # novel classes have no order
    assert max((predicted == expected).mean() for expected in (truth, swapped)) > 0.9
    np.testing.assert_array_equal(found.labels_, np.where(y == -1, predicted, y))
    assert not hasattr(finder, "classes_")
    with pytest.raises(ValueError, match=r"none of 1 images can be used, .*missing\.png"):
        found.predict(["missing.png"])
    for wrong in (truth, np.full_like(truth, -1)):
        with pytest.raises(ValueError, match="-1 for images without a label"):
            clone(finder).fit(images, wrong)


@pytest.fixture(scope="module")
def finder(tmp_path_factory):
    """Two novel classes by two epochs, on an encoder that has learned nothing."""
    encoder = write_network(tmp_path_factory.mktemp("encoder") / "encoder.safetensors")
    settings = {"workers": 0}
    how = {"image_shape": (8, 8), "epochs": 2, "device": "cpu", "settings": settings}
    return NovelClassDiscovery(2, encoder=str(encoder), random_state=0, **how)


@pytest.mark.parametrize("mode", ["gcd", "ncd"])
def test_the_labels_are_those_of_the_run(digits, finder, mode, tmp_path):
    """In ncd, no image without a label is of a known class, whatever `predict` says of it."""
    images, truth = (array[np.isin(digits[1], range(6))] for array in digits)
    y = np.where(truth < 4, truth, -1)
    found = clone(finder).set_params(mode=mode, output=tmp_path / "run").fit(images, y)
    names = [str(label) for label in range(4)] + ["new-1", "new-2"]
    table = rows(tmp_path / "run" / "assignments.csv")
    assert [int(row["path"]) for row in table] == np.flatnonzero(y == -1).tolist()
    assert found.labels_[y == -1].tolist() == [names.index(row["cluster"]) for row in table]
    np.testing.assert_array_equal(found.labels_[y != -1], y[y != -1])
    if mode == "ncd":
        assert {*found.labels_[y == -1].tolist()} <= {4, 5}
        assert (found.predict(images)[y == -1] < 4).any(), "nothing was to be kept out"


ACCENTED = "e\u0301"  # One letter in two code points, which a run composes


@pytest.mark.parametrize(
    ("known", "names", "novel"),
    [
        (["a ", "b", "c", ACCENTED], ("a", "b", "c", "\xe9"), ["new-1", "new-2"]),
        ([0.0, 1.0, 2.0, 5.0], ("0", "1", "2", "5"), [6.0, 7.0]),
    ],
    ids=["names", "floats"],
)
def test_classes_are_the_labels_that_were_given(digits, finder, known, names, novel):
    images, truth = (array[np.isin(digits[1], range(6))] for array in digits)
    own = np.array([*known, -1, -1], dtype=object if known[0] else float)[truth]
    found = clone(finder).fit(images, own)
    assert found.classes_.tolist() == known + novel
    labeled = own != -1
    assert found.labels_[labeled].tolist() == own[labeled].tolist()
    assert found.classifier_.classes == (*names, "new-1", "new-2"), "not in the same order"


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", "a "], "the label 'a', which is read as 'a', like another one"),
        (["1", "1.0"], "the label '1', which is read as '1', like another one"),
        ([0.0, np.nan], "the label nan, which is no class"),
    ],
)
def test_labels_that_a_run_would_read_otherwise_are_refused(digits, finder, labels, message):
    y = np.array([*labels, -1] * 4, dtype=object)
    with pytest.raises(ValueError, match=message):
        clone(finder).fit(digits[0][: len(y)], y)


def test_a_discovery_names_the_file_that_cannot_be_read(digits, finder, tmp_path):
    """One that is no image before anything is trained."""
    images, truth = (array[:40] for array in digits)
    y, out = np.where(truth < 3, truth, -1), tmp_path / "run"
    named = {f"{n:02}.png": digit_pixels(x.reshape(8, 8)) for n, x in enumerate(images)}
    paths = sorted(save(tmp_path / "images", named).iterdir())
    content, message = paths[7].read_bytes(), r"cannot read .*07.png: .*; leave it out"
    paths[7].write_text("no image")
    with pytest.raises(ValueError, match=message):
        clone(finder).set_params(output=out).fit(paths, y)
    assert not out.exists()
    paths[7].write_bytes(content[: content.index(b"IDAT") + 8])
    with pytest.raises(ValueError, match=message):
        clone(finder).fit(paths, y)
