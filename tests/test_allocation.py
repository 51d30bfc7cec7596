"""Memory that stays from step to step: no page of it is asked for twice."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator alone is told")

# In a process of its own: how a heap behaves depends on all that was ever in it.
PROGRAM = """
import json, resource, torch
from nearkin.training.allocation import memory_kept

def pages_of_a_large_tensor():
    found = []
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(16 * 2**20)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found)

with memory_kept():
    kept = pages_of_a_large_tensor()
print(json.dumps([kept, pages_of_a_large_tensor()]))
"""


def test_large_tensors_get_the_same_pages_again_and_give_them_back_in_the_end():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kept, after = json.loads(said)
    assert kept < 16
    assert after > kept  # 32 if they are huge ones, else 16,384
