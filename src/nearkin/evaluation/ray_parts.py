"""Parts of embeddings made on a Ray cluster, by actors that open encoder and images once.

Ray decides which actor makes which part, and gives the part of a lost actor to another. Its driver
is a process of its own: Ray ends the process whose cluster loses its head.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

from nearkin import errors
from nearkin.errors import DataError, NearkinError, ResourceError, UsageError, WorkerError
from nearkin.pace import count
from nearkin.schema import Auto

ADDRESS: Final = "RAY_ADDRESS"  # The variable by which Ray's own commands find a cluster
INSTALL: Final = "--engine ray needs Ray Data; pip install 'nearkin[ray]'"
BLOCKS: Final = 10_000  # Of Ray's data set; if there are more parts, a block is of several
SECONDS: Final = 10  # Within which a cluster answers, and a driver leaves it


@dataclass(frozen=True)
class ActorPool:
    """Actors that do the same work, each with the same resources."""

    actors: int
    cpus: int  # Of each
    gpus: int  # Of each

    @classmethod
    def of(cls, nodes: Sequence[Mapping[str, float]], parts: int, device: str) -> "ActorPool":
        """Return one actor per GPU or, without GPUs, of as many CPUs as the smallest node has.

        Larger nodes have several. There are no more actors than parts.

        Args:
            nodes: The resources of each node, as Ray names them.
            parts: How many parts are to be made.
            device: Where to compute, as `choose_device` takes it.
        """
        by_gpu = device.startswith("cuda") or (
            device == "auto" and any(node.get("GPU", 0) >= 1 for node in nodes)
        )
        kind = "GPU" if by_gpu else "CPU"
        usable = [node for node in nodes if node.get(kind, 0) >= 1]
        if not usable:
            raise ResourceError(f"no node of the Ray cluster has a {kind}; add one that has")
        cpus = min(int(node.get("CPU", 0) // (node["GPU"] if by_gpu else 1)) for node in usable)
        slots = sum(int(node[kind] // (1 if by_gpu else cpus)) for node in usable)
        return cls(min(slots, parts), cpus, int(by_gpu))

    def line(self, nodes: int, parts: int) -> str:
        """Return what is going to be done, as a line of text."""
        actors = f"{count(self.actors, 'actor')} of {count(self.cpus, 'CPU')}"
        each = f"{actors} and a GPU each" if self.gpus else f"{actors} each"
        return f"Ray cluster of {count(nodes, 'node')}: {count(parts, 'part')} by {each}"


@dataclass(frozen=True)
class PartJob:
    """What parts are made from, by names that mean the same on all nodes."""

    encoder: str
    data: str
    output: str
    folder: str  # Where relative names begin
    labels: str
    image_size: int | Auto
    allow_partial: bool
    device: str
    workers: int | Auto
    batch_size: int | Auto = "auto"
    trust_remote_code: bool = False


class PartActor:
    """What an actor runs: it makes the parts whose numbers it is given."""

    def __init__(self, job: Mapping[str, Any], cpus: int) -> None:
        self._job, self._cpus = PartJob(**job), cpus

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return an event: the part that is made, or the error that prevents it."""
        try:
            ((name, images),) = self._made(int(batch["item"][0]))
            event = json.dumps({"name": name, "images": images})
        except NearkinError as error:
            event = _error(error, f"on node {socket.gethostname()}: ")
        return {"event": [event]}

    def _made(self, number: int) -> Iterator[tuple[str, int]]:
        from nearkin.distributed import choose_device
        from nearkin.encoders.inference import inference

        folder, encoder, images = self._opened
        workers = self._job.workers
        made: Iterator[tuple[str, int]] = folder.compute(
            [number],
            inference(
                encoder,
                choose_device(self._job.device),
                folder.note.precision,
                self._job.batch_size,
                count=len(images),
            ),
            images,
            workers=self._cpus if workers == "auto" else int(workers),
        )
        return made

    @cached_property
    def _opened(self) -> Any:
        """The folder, the encoder and the images, if these are what the folder is of."""
        from nearkin.data.opening import open_images
        from nearkin.encoders.encoder import load
        from nearkin.evaluation.parts import PartFolder, note_on

        job = self._job
        with suppress(OSError):  # names need not be relative
            os.chdir(job.folder)
        folder = PartFolder.open(Path(job.output))
        size = None if job.image_size == "auto" else int(job.image_size)
        encoder = load(
            job.encoder,
            image_size=size,
            allow_partial=job.allow_partial,
            trust_remote_code=job.trust_remote_code,
        )
        images = open_images(job.data, labels=job.labels)
        note = folder.note
        if note_on(encoder.digest, images, note.shard, note.precision) != note:
            raise DataError(
                f"{job.encoder} or {job.data} is another one there; all nodes need the same files "
                "and versions"
            )
        return folder, encoder, images


def check_ray() -> None:
    """Refuse to go on without Ray, or if nobody listens where the cluster should be.

    Ray itself would ask for two minutes.

    Raises:
        UsageError: If Ray is not installed, or the address is none.
        WorkerError: If the cluster does not answer.
    """
    address = os.environ.get(ADDRESS, "")
    if address not in ("", "auto", "local"):
        _check_answer(address)
    if find_spec("ray") is None:
        raise UsageError(INSTALL)


def _check_answer(address: str) -> None:
    try:
        place = urlsplit(f"//{address}")
        host, port = place.hostname, place.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise UsageError(f"{ADDRESS}={address} is no address of a Ray cluster; give HOST:PORT")
    try:
        socket.create_connection((host, port), SECONDS).close()
    except OSError as error:
        raise WorkerError(
            f"no Ray cluster answers at {ADDRESS}={address} ({error.strerror or error}); start it "
            "or give another address"
        ) from error


def run_on_ray(job: PartJob, parts: Sequence[int], cpus: int) -> Iterator[Any]:
    """Make parts on the cluster at RAY_ADDRESS, or on one that is started on this machine.

    Args:
        job: What the parts are made from.
        parts: Their numbers.
        cpus: How many CPUs a cluster has that is started here.

    Yields:
        `{"plan": text}`, what is going to be done; then `{"name": text, "images": number}` after
        each part.

    Raises:
        WorkerError: If the cluster fails. What is written stays.
        NearkinError: If an actor cannot make its part.
    """
    order = {"job": asdict(job), "parts": list(parts), "cpus": cpus}
    with (
        tempfile.TemporaryFile("w+") as ordered,
        tempfile.TemporaryFile() as messages,  # of Ray, which are many
    ):
        json.dump(order, ordered)
        ordered.seek(0)
        with subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import drive; drive()"],
            stdin=ordered,
            stdout=subprocess.PIPE,
            stderr=messages,
            env={"RAY_USAGE_STATS_ENABLED": "0", **os.environ},
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which ends the driver
        ) as driver:
            try:
                yield from map(_received, driver.stdout or ())
                if driver.wait():
                    raise WorkerError(
                        f"the Ray cluster failed ({_last_line(messages)}); the parts that are "
                        "written stay, and the same command makes the others"
                    )
            finally:
                driver.terminate()
                with suppress(subprocess.TimeoutExpired):
                    driver.wait(SECONDS)
                driver.kill()


def _received(line: str) -> Any:
    """Return an event of the driver, or raise its error."""
    event = json.loads(line)
    if "error" in event:
        raise getattr(errors, event["error"])(event["text"])
    return event


def _last_line(messages: IO[bytes]) -> str:
    """Return the end of what the driver has printed, which is the reason for its own."""
    messages.seek(0)
    lines = messages.read().decode(errors="replace").strip().splitlines()
    said = lines[-1] if lines else "it gave no reason"
    # Without the time, the place in Ray's source, and advice.
    return re.sub(r"^\[.*?\] (\S+:\d+: )?", "", said).partition(". ")[0][:200]


def drive() -> None:
    """Be Ray's driver: read an order from standard input, and print an event per line."""
    with os.fdopen(os.dup(1), "w", buffering=1) as events:
        os.dup2(2, 1)  # what Ray prints is no event
        try:
            for event in _run(**json.load(sys.stdin)):
                events.write(f"{event}\n")
        except ImportError:
            events.write(f"{_error(UsageError(INSTALL))}\n")
        except NearkinError as error:
            events.write(f"{_error(error)}\n")


def _run(job: Mapping[str, Any], parts: Sequence[int], cpus: int) -> Iterator[str]:
    """Let a pool of actors make parts; yield events."""
    import ray
    import ray.data

    address = os.environ.get(ADDRESS) or "local"
    own = {"num_cpus": cpus, "include_dashboard": False} if address == "local" else {}
    ray.init(address, log_to_driver=False, logging_level="ERROR", **own)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    pool = ActorPool.of(nodes, len(parts), job["device"])
    yield json.dumps({"plan": pool.line(len(nodes), len(parts))})
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_no_progress_timeout_s = -1  # a part may take an hour
    numbers = ray.data.from_items(list(parts), override_num_blocks=min(len(parts), BLOCKS))
    made = numbers.map_batches(
        PartActor,
        fn_constructor_args=(job, pool.cpus),
        batch_size=1,
        # A part that waits for an actor waits for this one, even if another has nothing to do.
        compute=ray.data.ActorPoolStrategy(size=pool.actors, max_tasks_in_flight_per_actor=1),
        num_cpus=pool.cpus,
        num_gpus=pool.gpus,
    )
    for row in made.iter_rows():
        yield row["event"]


def _error(error: NearkinError, where: str = "") -> str:
    """Return an error as an event."""
    return json.dumps({"error": type(error).__name__, "text": f"{where}{error}"})
