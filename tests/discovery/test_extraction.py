"""Features of images and of their views: a function of seed and image, whole after any stop."""

import numpy as np
import pytest
import torch
from PIL import Image

from nearkin.data.opening import open_images
from nearkin.discovery.features import Extraction, ViewSettings
from nearkin.encoders.encoder import Encoder
from nearkin.evaluation import embeddings
from nearkin.networks.backbone import build_backbone

CPU = torch.device("cpu")
PART = 60
"""Images in a file of features, of which there are usually more."""
BAD = PART + 3
"""An unreadable image of the second part."""


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return Encoder(build_backbone("tiny", 8), 8, {})


@pytest.fixture(scope="module")
def images():
    return open_images(np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Images of two parts, one of them broken."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number, pixels in enumerate(rng.integers(0, 256, (PART + 40, 8, 8, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(folder / f"{number:05d}.png")
    broken = folder / f"{BAD:05d}.png"
    broken.write_bytes(broken.read_bytes()[:60])
    return open_images(folder)


def features(encoder, images, num_views, seed=0):
    extraction = Extraction(encoder, images, ViewSettings("characters", num_views, seed), CPU, 0)
    return extraction.compute()[0]


def test_features_are_a_function_of_the_seed(encoder, images):
    one, same, other = (features(encoder, images, 3, seed) for seed in (0, 0, 1))
    assert one.center.shape == (40, 128)
    assert one.views.shape == (3, 40, 128)
    assert torch.equal(one.views, same.views)
    assert torch.equal(one.center, other.center)
    assert not torch.equal(one.views, other.views)
    assert not torch.equal(one.views[0], one.views[1])
    none = features(encoder, images, 0)  # without views
    assert none.views.shape == (0, 40, 128)
    assert torch.equal(none.center, one.center)


def test_features_are_in_the_order_of_the_images(encoder, images):
    every = features(encoder, images, 2)
    rows = np.array([4, 17, 31])
    some = features(encoder, images.subset(rows), 2)
    torch.testing.assert_close(some.center, every.center[rows])
    unit = torch.nn.functional.normalize
    own = (unit(every.views, dim=2) * unit(every.center, dim=1)).sum(dim=2)
    others = (unit(every.views, dim=2) * unit(every.center.roll(1, 0), dim=1)).sum(dim=2)
    assert own.mean() > others.mean()


def test_a_stopped_extraction_goes_on_with_the_images_that_are_missing(
    encoder, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(embeddings, "PART", PART)
    given = encoder, files, ViewSettings("characters", 2, 0), CPU, 0
    whole, bad = Extraction(*given).compute()
    assert list(bad) == [BAD]

    def stop(done, total, text):
        if done > 3 * PART:  # in the second part, of which nothing is kept
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Extraction(*given, stop).compute_in(tmp_path / "parts")
    [kept] = (tmp_path / "parts").iterdir()
    written, computed = kept.stat().st_mtime_ns, []

    def progress(done, total, text):
        computed.append((done, total))

    features, same_bad = Extraction(*given, progress).compute_in(tmp_path / "parts")
    assert computed[-1] == (3 * 40, 3 * 40)
    assert kept.stat().st_mtime_ns == written
    assert same_bad == bad
    readable = np.arange(len(files)) != BAD
    assert torch.equal(features.center[readable], whole.center[readable])
    assert torch.equal(features.views[:, readable], whole.views[:, readable])
