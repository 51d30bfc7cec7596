"""Settings of all tests."""

import torch
from hypothesis import settings

settings.register_profile("nearkin", deadline=None, derandomize=True)  # no test is timed
settings.load_profile("nearkin")

torch.set_num_threads(1)  # the networks are tiny, and results must not depend on the machine
