"""Settings of all tests."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image

settings.register_profile("nearkin", deadline=None, derandomize=True)  # no test is timed
settings.load_profile("nearkin")

torch.set_num_threads(1)  # the networks are tiny, and results must not depend on the machine


class Lines:
    """Keeps log lines."""

    def __init__(self):
        self.texts = []

    def info(self, text):
        self.texts.append(text)

    def progress(self, done, total, text):
        pass


@pytest.fixture
def log():
    return Lines()


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    """A folder of twelve JPEGs that no test changes."""
    folder = tmp_path_factory.mktemp("photographs")
    rng = np.random.default_rng(0)
    for number in range(12):
        noise = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((160, 120)).save(folder / f"{number:02d}.jpg")
    return folder
