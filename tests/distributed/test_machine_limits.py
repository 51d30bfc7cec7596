"""What the machine and its control groups leave to a process."""

from nearkin.distributed import free_memory


def test_free_memory_is_that_of_the_tightest_control_group(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

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
