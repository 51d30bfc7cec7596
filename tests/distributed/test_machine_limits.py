"""What the machine and its control groups leave to a process, and memory that it keeps."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from builders import write_files

from nearkin.distributed import available_cpus, choose_device, cpus_per_process, free_memory
from nearkin.distributed.devices import cpu_quota
from nearkin.errors import UsageError


def test_free_memory_is_that_of_the_tightest_control_group(tmp_path):
    def write(path, text):
        write_files(tmp_path, {path: text.encode()})

    assert free_memory() > 2**20  # of this machine
    assert free_memory(tmp_path) == 0
    write("proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:  4000 kB\n")
    write("proc/self/cgroup", "4:memory:/jobs/7\n1:cpu:/\n0::/user/me\n")
    assert free_memory(tmp_path) == 4_096_000
    write("sys/fs/cgroup/user/me/memory.max", "max\n")
    write("sys/fs/cgroup/user/memory.max", "3000000\n")
    assert free_memory(tmp_path) == 3_000_000
    write("sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", "2000000\n")
    assert free_memory(tmp_path) == 2_000_000
    write("sys/fs/cgroup/user/memory.current", "2500000\n")
    write("sys/fs/cgroup/user/memory.stat", "anon 1900000\nfile 500000\ninactive_file 400000\n")
    assert free_memory(tmp_path) == 900_000  # files that were read are given up
    group = "sys/fs/cgroup/memory/jobs"
    write(f"{group}/memory.usage_in_bytes", "1800000\n")
    assert free_memory(tmp_path) == 200_000
    write(f"{group}/memory.stat", "inactive_file 0\nrss 9\ntotal_inactive_file 300000\n")
    assert free_memory(tmp_path) == 500_000
    write(f"{group}/memory.usage_in_bytes", "2400000\n")
    assert free_memory(tmp_path) == 1  # none, and not: unknown


def version_1(group, quota):
    """The files of a control group of Linux's first version."""
    return {f"{group}/cpu.cfs_quota_us": f"{quota}\n", f"{group}/cpu.cfs_period_us": "100000\n"}


def test_the_quota_is_that_of_the_tightest_control_group(tmp_path):
    inf = math.inf
    cases = (
        ("0::/\n", {}, inf),
        ("0::/\n", {"cpu.max": "max 100000\n"}, inf),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a\n", {"a/cpu.max": "400000 100000\n", "other/cpu.max": "1 100000\n"}, 4.0),
        ("0::/not/here\n", {"cpu.max": "300000 100000\n"}, 3.0),  # as containers see theirs
        ("5:memory:/m\n3:cpuacct,cpu:/job\n0::/\n", version_1("cpu/job", 250000), 2.5),
        ("1:cpu:/\n", version_1("cpu", -1), inf),
        ("2:cpuset:/job\n", {"cpu/job/cpu.max": "100000 100000\n"}, inf),
        ("0::/odd\n", {"odd/cpu.max": "what\n"}, inf),
    )
    for number, (listed, limits, expected) in enumerate(cases):
        system = tmp_path / str(number)
        placed = {f"sys/fs/cgroup/{place}": text for place, text in limits.items()}
        placed["proc/self/cgroup"] = listed
        write_files(system, {place: text.encode() for place, text in placed.items()})
        assert cpu_quota(system) == expected, (listed, limits)
    assert cpu_quota(tmp_path / "nothing") == inf


def test_processes_on_one_machine_share_its_processors(monkeypatch):
    cpus = available_cpus()
    assert 1 <= cpus <= len(os.sched_getaffinity(0))
    for count in (1, 2, cpus, cpus + 1):
        assert cpus_per_process(count) == max(1, cpus // count), count
    for name, value in {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": str(cpus)}.items():
        monkeypatch.setenv(name, value)  # as torchrun does on each of several machines
    assert cpus_per_process() == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # as srun does, which gives each its own
    assert cpus_per_process() == cpus


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


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator alone is told")
@pytest.mark.slow
def test_large_tensors_get_the_same_pages_again_and_give_them_back_in_the_end():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usual, with_reuse, given_back = json.loads(output)
    assert with_reuse < 16
    assert usual > with_reuse  # 32 if they are huge ones, else 16,384
    assert given_back > 12_000  # of 16,384 pages of the last tensor


def test_a_gpu_that_cannot_be_used_leaves_the_cpu(monkeypatch, refusal):
    """As where its driver is too old, or torch is not built for it."""

    def zeros(*_, device):
        raise RuntimeError(f"no kernel image for {device}\nand more")

    for kind, there in ((torch.cuda, False), (torch.backends.mps, True)):
        monkeypatch.setattr(kind, "is_available", lambda there=there: there)
    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.warns(UserWarning, match=r"mps cannot be used here \(no kernel .* the CPU"):
        assert choose_device("auto") == torch.device("cpu")
    assert "(no kernel image for mps); give --device cpu" in refusal(2, "doctor", "--device=mps")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="give device cpu"):  # others may compute with theirs
        choose_device("auto")
