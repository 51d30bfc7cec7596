"""`nearkin embed --engine ray`: the shards of one process, whoever is killed meanwhile."""

import os
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from builders import contents, write_network
from nearkin_command import run
from processes import ended, environment, free_port, wait_until
from pyarrow import parquet
from ray_cluster import RayCluster
from torch import nn

from nearkin.commands.embed import embed_shards, open_on_node
from nearkin.config import EmbedConfig
from nearkin.errors import ResourceError, UsageError
from nearkin.evaluation.ray_shards import ShardActor, actor_pool

IMAGES, SHARD, SHARDS = 40, 3, 14
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
    """An encoder, images, and the shards of one process; read, never written."""
    folder = tmp_path_factory.mktemp("ray")
    write_network(folder / "encoder.safetensors")
    (folder / "slow.py").write_text(SLOW)
    assert run(*arguments(folder, folder / "expected", engine="local")) == 0
    return folder


def arguments(folder, output, engine="ray"):
    encoder, data = folder / "encoder.safetensors", f"{folder / 'slow.py'}:load"
    command = ["embed", str(encoder), data, "-o", f"{output}/", "--shard-size", str(SHARD)]
    return [*command, "--engine", engine, "--workers", "0"]


def nodes_of(*nodes):
    """Nodes with these numbers of CPUs and GPUs, as Ray has them."""
    return [{"memory": 1e9, "CPU": float(cpus), "GPU": float(gpus)} for cpus, gpus in nodes]


def test_one_actor_per_gpu_or_of_the_cpus_of_the_smallest_node():
    for nodes, device, pool in (
        ([(8, 0), (8, 0)], "auto", (2, 8, 0)),
        ([(8, 0), (16, 0), (0, 0)], "auto", (3, 8, 0)),  # a head often has no CPUs
        ([(3, 0), (7, 0)], "cpu", (3, 3, 0)),
        ([(16, 0), (16, 4), (6, 2)], "auto", (6, 3, 1)),
        ([(16, 4)], "cpu", (1, 16, 0)),
        ([(1, 4)], "cuda", (4, 0, 1)),
    ):
        assert actor_pool(nodes_of(*nodes), device) == pool, (nodes, device)
    for node, device in (((0, 1), "cpu"), ((0.5, 0.5), "auto")):
        with pytest.raises(ResourceError, match="no node of the Ray cluster has a CPU"):
            actor_pool([{"memory": 1e9}, *nodes_of(node)], device)


def actor(folder, output, **changed):
    """An actor for the shards of an output, which finds relative names in the folder."""
    config = EmbedConfig(encoder="encoder.safetensors", device="cpu", workers=0)
    names = {"config": config, "data": "slow.py:load", "output": output} | changed
    opener = partial(open_on_node, **names)
    return ShardActor(opener, 0, str(folder))


def answer(actor, number):
    """What an actor answers to a shard: its text, how many images it has, and the error."""
    return tuple(value for (value,) in actor({"item": np.array([number])}).values())


def test_an_actor_makes_the_bytes_of_one_process_and_no_shard_twice(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = shutil.copytree(folder / "expected", tmp_path / "v")
    (output / "shard-000013.parquet").unlink()
    there = (output / "shard-000002.parquet").stat().st_mtime_ns
    makes = actor(folder, output)
    assert answer(makes, 13) == ("shard 14 of 14", 1, "")
    assert answer(makes, 2) == ("shard 3 of 14", 3, "")
    assert contents(output) == contents(folder / "expected")
    assert (output / "shard-000002.parquet").stat().st_mtime_ns == there


def test_an_actor_that_sees_other_files_says_on_which_node(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "other.npz", x=np.zeros((5, 8, 8, 3), np.uint8))
    for output, data, kind in (
        (folder / "expected", str(tmp_path / "other.npz"), "OutputError"),
        (tmp_path, "slow.py:load", "UsageError"),  # the folder is not there
    ):
        text, count, error = answer(actor(folder, output, data=data), 0)
        assert (count, error) == (0, kind)
        assert text.startswith(f"on node {os.uname().nodename}: {output} ")
    assert contents(tmp_path).keys() == {"other.npz"}


def test_without_ray_the_extra_is_named(folder, tmp_path, monkeypatch, refusal):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'nearkin[ray]'" in refusal(2, *arguments(folder, tmp_path / "v"))
    assert not (tmp_path / "v").exists()


@pytest.mark.slow
@pytest.mark.needs("ray")
def test_a_cluster_that_does_not_answer_or_has_no_address_is_one_line(
    folder, tmp_path, monkeypatch, refusal
):
    address = f"127.0.0.1:{free_port()}"
    for given, reason in (
        (address, f"no Ray cluster answers at RAY_ADDRESS={address} (Connection refused)"),
        ("here", "Ray failed (Invalid address format: here)"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", given)
        assert reason in refusal(9, *arguments(folder, tmp_path / "v"))
    assert contents(tmp_path / "v").keys() == {"_shards.json"}


def test_what_ray_does_not_divide_is_refused(folder, tmp_path, monkeypatch, refusal):
    command = arguments(folder, tmp_path / "v")
    alone = ["embed", folder / "encoder.safetensors", folder, "--engine", "ray"]
    assert "-o FOLDER/" in refusal(2, *alone)
    assert "name of one file" in refusal(2, *alone, "-o", "x.npz")
    assert "--shard 1/2 both divide" in refusal(2, *command, "--shard", "1/2")
    for given in ({"data": np.zeros((5, 8, 8, 3), np.uint8)}, {"backbone": nn.Identity()}):
        given = {"encoder": folder / "encoder.safetensors", "data": "digits", **given}
        with pytest.raises(UsageError, match="names that all nodes know"):
            embed_shards(output=tmp_path / "v", engine="ray", **given)
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


def wait_for(shards, output, process):
    wait_until(lambda: len(list(output.glob("shard-*"))) >= shards, process)


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
    assert f"{SHARDS} of {SHARDS} shards written" in out
    made = [line for line in err.splitlines() if line.startswith("shard")]
    rows = [3] * 13 + [1]
    names = [f"shard {n + 1} of {SHARDS}: {count} images" for n, count in enumerate(rows)]
    assert sorted(made) == sorted(names)
    others = [line for line in err.splitlines() if not line.startswith("shard")]
    assert all(line.startswith(("encoder", "images")) or "%  shards" in line for line in others)
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
    assert line.startswith("error: the Ray cluster was lost; the shards that are written stay")
    assert "Traceback" not in err
    before = {path: path.stat().st_mtime_ns for path in output.glob("shard-*")}
    assert 3 <= len(before) < SHARDS
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
