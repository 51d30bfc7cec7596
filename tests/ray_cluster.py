"""A Ray cluster on this machine, in a process of its own, whose parts tests kill.

Run as a program it is that process: it reads orders from standard input, and answers each.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLE = "NEARKIN_TEST_CLUSTER"
"""What the processes of a cluster know it by; other people may have one on the same machine."""
ACTOR = b"ray::MapWorker"


class RayCluster:
    """A head without CPUs and two nodes with one each, as a `with` block."""

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="nearkin-")  # short: it is part of names of sockets
        env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", VARIABLE: self.folder}
        self.process = subprocess.Popen(
            [sys.executable, __file__, self.folder],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._answer()
        return self

    def __exit__(self, *error):
        self.process.communicate()
        for pid in self._pids(b""):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answer(self):
        return next(line for line in self.process.stdout if line.startswith("ray: "))[5:].strip()

    def kill(self, what):
        """Kill the head, a node with all its processes, or one actor."""
        if what == "actor":
            os.kill(self._pids(ACTOR)[0], signal.SIGKILL)
            return
        print(what, file=self.process.stdin, flush=True)
        assert self._answer() == f"killed {what}"

    def _pids(self, name):
        """The processes of this cluster whose command line begins so."""
        mark, found = f"{VARIABLE}={self.folder}".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                ours = mark in (path / "environ").read_bytes().split(b"\0")
                if ours and (path / "cmdline").read_bytes().startswith(name):
                    found.append(int(path.name))
            except OSError:  # it has just ended, or is not ours
                continue
        return found


def main(folder):
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1)
    nodes = {"head": cluster.head_node, "node": cluster.add_node(num_cpus=1)}
    print(f"ray: {cluster.address}", flush=True)
    for order in map(str.strip, sys.stdin):
        cluster.remove_node(nodes[order], allow_graceful=False)
        print(f"ray: killed {order}", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
