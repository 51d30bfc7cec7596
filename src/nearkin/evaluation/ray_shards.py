"""`nearkin embed --engine ray`: the shards of features by the actors of a Ray cluster.

Ray Data divides the numbers of the shards among actors, each of which opens encoder and images
once, and gives the shard of a lost actor to another. A shard is a file, whole or not at all. The
driver is a process of its own: Ray ends the process whose cluster loses its head.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from nearkin import errors
from nearkin.data.images import Images
from nearkin.distributed import available_cpus
from nearkin.encoders.inference import Inference
from nearkin.errors import NearkinError, ResourceError, WorkerError
from nearkin.evaluation.shards import ShardFolder

Opener = Callable[[], tuple[ShardFolder, Inference, Images]]
KEPT: Final = "the shards that are written stay, and the same command makes the others"
SECONDS: Final = 10  # Within which a cluster answers, and a driver leaves it


class ShardActor:
    """What an actor runs: it makes the shards whose numbers it is given."""

    def __init__(self, opener: Opener, workers: int, cwd: str) -> None:
        self.opener, self.workers, self.cwd = opener, workers, cwd

    @cached_property
    def opened(self) -> tuple[ShardFolder, Inference, Images]:
        """The folder, the encoder and the images; names that are relative begin as there."""
        with suppress(OSError):
            os.chdir(self.cwd)
        return self.opener()

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return the name of a shard and how many images it has, or the error that prevents it."""
        try:
            folder, by, images = self.opened
            made = folder.compute([int(batch["item"][0])], by, images, workers=self.workers)
            ((text, count),), error = made, ""
        except NearkinError as raised:
            text, count, error = str(raised), 0, type(raised).__name__
            text = f"on node {os.uname().nodename}: {text}"
        return {"text": [text], "images": [count], "error": [error]}


def compute_on_ray(
    opener: Opener, numbers: Sequence[int], device: str, workers: int | None
) -> Iterator[tuple[str, int]]:
    """Make shards on the cluster at RAY_ADDRESS, or on one that is started on this machine.

    `opener` opens the folder of shards, the encoder and the images, on any node. `workers` decode
    images for an actor; None for as many as it has CPUs.

    Yields:
        After each shard, its name and how many images it has.

    Raises:
        WorkerError: If the cluster fails. What is written stays.
        NearkinError: If an actor cannot make its shard.
    """
    context = multiprocessing.get_context("spawn")
    events, sender = context.Pipe(duplex=False)
    driver = context.Process(target=_drive, args=(sender, opener, list(numbers), device, workers))
    driver.start()
    sender.close()  # the driver's is the only one, so that events end with it
    try:
        with suppress(EOFError):
            while True:
                event = events.recv()
                if isinstance(event, NearkinError):
                    raise event
                yield event
        driver.join()
        if driver.exitcode:
            raise WorkerError(f"the Ray cluster was lost; {KEPT}")
    finally:
        driver.terminate()
        driver.join(SECONDS)
        driver.kill()


def _drive(
    events: Connection, opener: Opener, numbers: list[int], device: str, workers: int | None
) -> None:
    """Be Ray's driver: send what each shard was, or an error."""
    os.setsid()  # Ctrl-C is for the other process, which ends this one
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)  # Ray says much
    try:
        for row in _rows(opener, numbers, device, workers):
            if row["error"]:
                raise getattr(errors, row["error"])(row["text"])
            events.send((row["text"], row["images"]))
    except NearkinError as error:
        events.send(error)
    except Exception as error:  # of many kinds: the first line says what is wrong
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        events.send(WorkerError(f"Ray failed ({reason[:200]}); {KEPT}"))


def _rows(opener: Opener, numbers: list[int], device: str, workers: int | None) -> Iterator[Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    import ray.data

    address = os.environ.get("RAY_ADDRESS") or "local"
    _check_answer(address)
    own = {"num_cpus": available_cpus()} if address == "local" else {}
    ray.init(address, log_to_driver=False, **own)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    (actors, cpus, gpus), cwd = actor_pool(nodes, device), str(Path.cwd())
    ray.data.DataContext.get_current().execution_no_progress_timeout_s = -1  # a shard may be long
    # Not `range`, which is read by tasks that wait for the CPUs of the actors.
    rows: Iterator[Any] = (
        ray.data.from_items(numbers, override_num_blocks=len(numbers))
        .map_batches(
            ShardActor,
            fn_constructor_args=(opener, cpus if workers is None else workers, cwd),
            batch_size=1,
            # One shard at a time, or some would wait for an actor while another has nothing to do.
            compute=ray.data.ActorPoolStrategy(
                size=min(actors, len(numbers)), max_tasks_in_flight_per_actor=1
            ),
            num_cpus=cpus,
            num_gpus=gpus,
        )
        .iter_rows()
    )
    yield from rows


def _check_answer(address: str) -> None:
    """Refuse an address where nobody listens, for which Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), SECONDS).close()
        except OSError as error:
            raise WorkerError(
                f"no Ray cluster answers at RAY_ADDRESS={address} ({error.strerror or error}); "
                "start it or give another address"
            ) from error


def actor_pool(nodes: Sequence[Mapping[str, float]], device: str) -> tuple[int, int, int]:
    """Return how many actors there are, and the CPUs and GPUs of each.

    One is for each GPU or, without any, for as many CPUs as the smallest node has.
    """
    gpus = int(device != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes))
    having = [node for node in nodes if node.get("GPU" if gpus else "CPU", 0) >= 1]
    if not having:
        raise ResourceError("no node of the Ray cluster has a CPU; add one that has")
    cpus = int(min(node.get("CPU", 0) // (node["GPU"] if gpus else 1) for node in having))
    return int(sum(node["GPU"] if gpus else node["CPU"] // cpus for node in having)), cpus, gpus
