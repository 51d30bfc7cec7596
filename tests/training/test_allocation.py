"""Memory that stays from step to step: no page of it is asked for twice."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator alone is told")

# In a process of its own: how a heap behaves depends on all that was ever in it.
PROGRAM = """
import json, resource, torch
from nearkin.distributed.allocation import keep_freed_memory

def pages_of_a_large_tensor():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1])

usual = min(pages_of_a_large_tensor() for _ in range(5))
with keep_freed_memory():
    with_reuse = min(pages_of_a_large_tensor() for _ in range(20))
    held = resident()
print(json.dumps([usual, with_reuse, held - resident()]))
"""


@pytest.mark.slow
def test_large_tensors_get_the_same_pages_again_and_give_them_back_in_the_end():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usual, with_reuse, given_back = json.loads(output)
    assert with_reuse < 16
    assert usual > with_reuse  # 32 if they are huge ones, else 16,384
    assert given_back > 12_000  # of 16,384 pages of the last tensor
