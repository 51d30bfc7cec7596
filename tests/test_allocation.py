"""Memory that stays from step to step: no page of it is asked for twice."""

import resource
import sys

import pytest
import torch

from nearkin.training.allocation import memory_kept

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator alone is told")

NUMBERS = 16 * 2**20


def pages_of_a_large_tensor() -> int:
    """How many the system had to clear for 64 MB, once the heap has found its shape."""
    found = []
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(NUMBERS)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found)


def test_large_tensors_get_the_same_pages_again_and_give_them_back_in_the_end():
    with memory_kept():
        kept = pages_of_a_large_tensor()
    assert kept < 16
    assert pages_of_a_large_tensor() > kept  # 32 if they are huge ones, else 16,384
