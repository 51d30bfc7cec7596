"""`nearkin embed --engine ray`: the parts of one process, whoever is killed meanwhile."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
from builders import contents, write_network
from nearkin_command import run
from processes import ended, environment, free_port, wait_until
from pyarrow import parquet
from ray_cluster import RayCluster
from torch import nn

from nearkin.commands.embed import embed_parts
from nearkin.errors import ResourceError, UsageError
from nearkin.evaluation.ray_parts import ActorPool, PartActor, PartJob

IMAGES, SHARD, PARTS = 40, 3, 14
SLOW = """
import os
import time
import numpy as np

class load:
    names = [f"{number:02}" for number in range(40)]

    def read(self, name):
        time.sleep(0.2 if "NEARKIN_TEST_CLUSTER" in os.environ else 0)
        return np.random.default_rng(int(name)).integers(0, 256, (70, 70, 3), dtype=np.uint8)
"""
"""Images that an actor reads slowly enough for kills amid the work."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An encoder, images, and the parts of one process; read, never written."""
    folder = tmp_path_factory.mktemp("ray")
    write_network(folder / "encoder.safetensors")
    (folder / "slow.py").write_text(SLOW)
    assert run(*arguments(folder, folder / "expected", engine="local")) == 0
    return folder


def arguments(folder, output, engine="ray"):
    encoder, data = folder / "encoder.safetensors", f"{folder / 'slow.py'}:load"
    command = ["embed", str(encoder), data, "-o", f"{output}/", "--shard", str(SHARD)]
    return [*command, "--engine", engine, "--workers", "0"]


def nodes_of(*nodes):
    """Nodes with these numbers of CPUs and GPUs, as Ray has them."""
    return [{"memory": 1e9, "CPU": float(cpus), "GPU": float(gpus)} for cpus, gpus in nodes]


def test_one_actor_per_gpu_or_of_the_cpus_of_the_smallest_node():
    for nodes, parts, device, pool in (
        ([(8, 0), (8, 0)], 100, "auto", (2, 8, 0)),
        ([(8, 0), (16, 0), (0, 0)], 100, "auto", (3, 8, 0)),  # a head often has no CPUs
        ([(3, 0), (7, 0)], 100, "cpu", (3, 3, 0)),
        ([(8, 0), (8, 0)], 1, "auto", (1, 8, 0)),
        ([(16, 0), (16, 4), (6, 2)], 100, "auto", (6, 3, 1)),
        ([(16, 4)], 100, "cpu", (1, 16, 0)),
        ([(1, 4)], 100, "cuda", (4, 0, 1)),
    ):
        assert ActorPool.of(nodes_of(*nodes), parts, device) == ActorPool(*pool), (nodes, device)
    refused = ((8, 0), "cuda", "GPU"), ((0, 1), "cpu", "CPU"), ((0.5, 0.5), "auto", "CPU")
    for node, device, kind in refused:
        with pytest.raises(ResourceError, match=f"has a {kind}"):
            ActorPool.of([{"memory": 1e9}, *nodes_of(node)], 3, device)


def job(folder, output):
    return PartJob(
        encoder="encoder.safetensors", data="slow.py:load", output=str(output), folder=str(folder),
        labels="auto", image_size="auto", allow_partial=False, device="cpu", workers=0,
    )  # fmt: skip


def asked(job, *numbers):
    """What an actor answers to each of these parts."""
    actor = PartActor(json.loads(json.dumps(asdict(job))), cpus=1)
    answers = (actor({"item": np.array([number])}) for number in numbers)
    return [json.loads(answer["event"][0]) for answer in answers]


def test_an_actor_makes_the_bytes_of_one_process_and_no_part_twice(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it goes, names are relative to the folder of the command
    output = shutil.copytree(folder / "expected", tmp_path / "v")
    (output / "part-000013.parquet").unlink()
    there = (output / "part-000002.parquet").stat().st_mtime_ns
    assert asked(job(folder, output), 13, 2) == [
        {"name": "part 14 of 14", "images": 1},
        {"name": "part 3 of 14", "images": 3},
    ]
    assert contents(output) == contents(folder / "expected")
    assert (output / "part-000002.parquet").stat().st_mtime_ns == there


def test_an_actor_that_sees_other_files_says_on_which_node(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = job(folder, folder / "expected")
    np.savez(tmp_path / "other.npz", x=np.zeros((5, 8, 8, 3), np.uint8))
    for kind, case in (
        ("DataError", replace(own, data=str(tmp_path / "other.npz"))),
        ("UsageError", replace(own, output=str(tmp_path))),
    ):
        (event,) = asked(case, 0)
        assert event["error"] == kind
        assert event["text"].startswith(f"on node {os.uname().nodename}: ")
    assert contents(tmp_path).keys() == {"other.npz"}


def test_without_ray_the_extra_is_named(folder, tmp_path, monkeypatch, refusal):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'nearkin[ray]'" in refusal(2, *arguments(folder, tmp_path / "v"))
    assert not (tmp_path / "v").exists()


def test_a_cluster_that_does_not_answer_or_has_no_address_is_one_line_at_once(
    folder, tmp_path, monkeypatch, refusal
):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    line = refusal(9, *arguments(folder, tmp_path / "v"))
    assert "no Ray cluster answers at RAY_ADDRESS=127.0.0.1" in line
    for address in ("here", "127.0.0.1", ":6379", "host:port", "h:99999", "[::1"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert f"{address} is no address" in refusal(2, *arguments(folder, tmp_path / "v"))
    assert not (tmp_path / "v").exists()


def test_what_ray_does_not_divide_is_refused(folder, tmp_path, monkeypatch, refusal):
    command = arguments(folder, tmp_path / "v")
    alone = ["embed", folder / "encoder.safetensors", folder, "--engine", "ray"]
    assert "-o FOLDER/" in refusal(2, *alone)
    assert "is one file" in refusal(2, *alone, "-o", "x.npz")
    assert "--part 1/2 both divide" in refusal(2, *command, "--part", "1/2")
    for given in ({"data": np.zeros((5, 8, 8, 3), np.uint8)}, {"backbone": nn.Identity()}):
        given = {"encoder": folder / "encoder.safetensors", "data": "digits", **given}
        with pytest.raises(UsageError, match="names that all nodes know"):
            embed_parts(output=tmp_path / "v", engine="ray", **given)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "2 processes both divide" in refusal(2, *command)
    assert not (tmp_path / "v").exists()


def start(folder, output, cluster):
    env = environment(RAY_ADDRESS=cluster.address, RAY_gcs_rpc_server_reconnect_timeout_s="5")
    return subprocess.Popen(
        [sys.executable, "-m", "nearkin", *arguments(folder, output)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(parts, output, process):
    wait_until(lambda: len(list(output.glob("part-*"))) >= parts, process)


@pytest.mark.slow
@pytest.mark.needs("ray")
def test_an_actor_and_a_node_are_killed_and_nothing_is_lost_or_twice(folder, tmp_path):
    output = tmp_path / "v"
    with RayCluster() as cluster:
        process = start(folder, output, cluster)
        wait_for(2, output, process)
        cluster.kill("actor")
        wait_for(5, output, process)
        cluster.kill("node")
        code, out, err = ended(process)
    assert code == 0, err
    assert f"{PARTS} of {PARTS} parts written" in out
    plan, *made = [line for line in err.splitlines() if line.startswith(("Ray", "part"))]
    assert plan == f"Ray cluster of 3 nodes: {PARTS} parts by 2 actors of 1 CPU each"
    rows = [3] * 13 + [1]
    names = [f"part {n + 1} of {PARTS}: {count} images" for n, count in enumerate(rows)]
    assert sorted(made) == sorted(names)
    others = [line for line in err.splitlines() if not line.startswith(("Ray", "part"))]
    assert all(line.startswith(("encoder", "images")) or "%  parts" in line for line in others)
    assert contents(output) == contents(folder / "expected")
    assert len(set(parquet.read_table(output)["path"].to_pylist())) == IMAGES


@pytest.mark.slow
@pytest.mark.needs("ray")
def test_a_cluster_that_loses_its_head_or_a_command_that_is_stopped_goes_on(folder, tmp_path):
    output = tmp_path / "v"
    with RayCluster() as cluster:
        process = start(folder, output, cluster)
        wait_for(3, output, process)
        cluster.kill("head")
        code, out, err = ended(process)
    assert (code, out) == (9, ""), err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: the Ray cluster failed (Failed to connect to GCS within")
    assert "Traceback" not in err
    before = {path: path.stat().st_mtime_ns for path in output.glob("part-*")}
    assert 3 <= len(before) < PARTS
    with RayCluster() as cluster:
        process = start(folder, output, cluster)
        wait_for(len(before) + 1, output, process)
        process.terminate()
        code, _, err = ended(process)
        assert code == 143, err
        code, out, err = ended(start(folder, output, cluster))
    assert code == 0, err
    assert contents(output) == contents(folder / "expected")
    assert {path: path.stat().st_mtime_ns for path in before} == before
