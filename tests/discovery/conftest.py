"""Digits, an encoder of them, and one discovery, which no test changes."""

import builders
import numpy as np
import pytest
from discoveries import LEAST, discover, save, table, words
from nearkin_command import run


@pytest.fixture(scope="session")
def arrays(tmp_path_factory):
    """Digits 0 to 7 as an .npz; the numbers of its images are their names."""
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    pixels, labels = builders.digits(16, 8)
    np.savez(path, x=pixels, y=labels)
    return path


@pytest.fixture(scope="session")
def encoder(tmp_path_factory, arrays):
    """A run whose encoder all discoveries stand on."""
    out = tmp_path_factory.mktemp("encoder") / "run"
    settings = words("--epochs 30 --batch-size 64 --backbone tiny --labels none -q")
    assert run("train", arrays, "-o", out, *settings) == 0
    return out


@pytest.fixture(scope="session")
def pixels():
    """Digits 0 to 4, by class."""
    images, labels = builders.digits(16, 5)
    return {number: images[labels == number] for number in range(5)}


@pytest.fixture(scope="session")
def flat(tmp_path_factory, pixels):
    """All in one folder, without labels: digit 3's sixth image is called 3-05.png."""
    named = {f"{n}-{row:02d}.png": p for n, some in pixels.items() for row, p in enumerate(some)}
    return save(tmp_path_factory.mktemp("flat") / "images", named)


@pytest.fixture(scope="session")
def parts(flat):
    """The images in that folder, and those that are held out of them."""
    from nearkin.data.opening import open_images  # see nearkin_command.py
    from nearkin.data.split import split_images

    return split_images(open_images(str(flat)), 0.1, 0)


@pytest.fixture(scope="session")
def labels(tmp_path_factory, flat):
    """A table that labels half of the images of digits 0, 1 and 2."""
    written = [(f"{n}-{row:02d}.png", f"digit {n}") for n in range(3) for row in range(8)]
    return table(tmp_path_factory.mktemp("labels") / "labels.csv", written)


@pytest.fixture(scope="session")
def folders(tmp_path_factory, pixels):
    """Class folders of four digits."""
    named = dict(enumerate(("cat", "dog", "eel", "fox")))
    few = {f"{named[n]}/{row}.png": p for n in named for row, p in enumerate(pixels[n][:8])}
    return save(tmp_path_factory.mktemp("folders") / "images", few)


@pytest.fixture(scope="session")
def discovery(tmp_path_factory, flat, labels, encoder):
    """A discovery of images in a folder, with a table of labels and copies beside it."""
    out = tmp_path_factory.mktemp("runs") / "run"
    settings = ["--labeled", labels, "--encoder", encoder, "--copy-to", out.parent / "copies"]
    assert discover(flat, "-o", out, *LEAST, *settings) == 0
    return out
