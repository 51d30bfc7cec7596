"""Checkpoints against kills, damage, full disks, foreign files and other runs. All files are real."""

import copy
import hashlib
import inspect
import io
import itertools
import math
import os
import pickle
import resource
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import PICKLE, Runs, zipped
from processes import fork
from small import same, save, small, spawn

from nearkin import files
from nearkin.errors import CheckpointError, DivergedError, ResourceError
from nearkin.files import whole, write_whole
from nearkin.training import checkpoint
from nearkin.training.checkpoint import Restored, latest, load
from nearkin.training.optimizer import build_optimizer


def run_at(step, name="moco", optimizer="lars", **options):
    """A method and its optimizer whose every number tells the step, after one real update."""
    method = small(name, **options)
    with torch.no_grad():
        for value in method.state_dict().values():
            value.fill_(step)
    for p in method.parameters():
        p.grad = torch.full_like(p, step + 1) if p.requires_grad else None
    built = build_optimizer(method, name=optimizer, lr=0.1, weight_decay=0.01)
    built.step()
    return method, built


def plain_at(step):
    """One with little to write."""
    return run_at(step, "simclr", "sgd")


def memory_of(run):
    method, optimizer = run
    return copy.deepcopy({"method": method.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.fixture
def folder(tmp_path):
    """Two checkpoints: of step 10 and of step 20."""
    for step in (10, 20):
        save(tmp_path / "checkpoints", step, *run_at(step))
    return tmp_path / "checkpoints"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_everything_comes_back_to_the_bit(tmp_path):
    kinds = itertools.product(
        ("moco", "simclr", "moco_memory_bank"), ("sgd", "lars", "adamw", "muon")
    )
    for kind in kinds:
        folder = tmp_path / "-".join(kind)
        written, restored = run_at(7, *kind), run_at(3, *kind)
        save(folder, 7, *written)
        assert not same(memory_of(restored), memory_of(written)), kind
        assert load(folder, *restored) == Restored(7, ()), kind
        assert same(memory_of(restored), memory_of(written)), kind


def test_a_run_starts_at_zero_without_checkpoints(tmp_path):
    run = run_at(5)
    before = memory_of(run)
    assert load(tmp_path / "absent", *run) == Restored(0, ())
    assert load(tmp_path, *run) == Restored(0, ())
    assert same(memory_of(run), before)
    assert latest(tmp_path) is None


def test_a_file_holds_one_state_and_ends_on_a_seal_that_other_programs_can_check(folder):
    whole = latest(folder).read_bytes()
    content, seal = whole[:-48], whole[-48:]
    assert seal[:8] == b"nearkin\n"
    assert int.from_bytes(seal[8:16], "big") == len(content)
    assert seal[16:] == hashlib.sha256(content).digest()
    held = torch.load(io.BytesIO(content), weights_only=True)
    assert held.keys() == {"format", "step", "method", "optimizer"}
    assert (held["format"], held["step"]) == (1, 20)
    assert save(folder / "again", 20, *run_at(20)).read_bytes() == whole


def test_the_newest_checkpoints_stay_and_what_is_not_one_is_left_alone(tmp_path):
    (tmp_path / "ckpt-best.pt").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    run = run_at(1)
    for step in (8, 9, 10, 99_999_999, 100_000_000):
        save(tmp_path, step, *run)
    newest = ["ckpt-00000010.pt", "ckpt-100000000.pt", "ckpt-99999999.pt"]
    assert names(tmp_path) == [*newest, "ckpt-best.pt", "notes.txt"]
    assert latest(tmp_path).name == "ckpt-100000000.pt"
    save(tmp_path, 100_000_001, *run, keep=1)
    assert names(tmp_path) == ["ckpt-100000001.pt", "ckpt-best.pt", "notes.txt"]


def test_a_checkpoint_of_the_same_step_is_replaced(folder):
    save(folder, 20, *run_at(21))
    run = run_at(0)
    assert load(folder, *run).step == 20
    assert same(memory_of(run), memory_of(run_at(21)))


def test_a_number_that_would_not_come_back_is_refused_before_anything_is_written(tmp_path):
    method, optimizer = run_at(1)
    optimizer.param_groups[0]["lr"] = np.float64(0.1)
    with pytest.raises(CheckpointError, match=r"a float64 at optimizer\.param_groups\.0\.lr"):
        save(tmp_path / "checkpoints", 1, method, optimizer)
    assert names(tmp_path) == []


def spoiled(value, of_optimizer):
    """A run in which one number of a weight, or of the optimizer, has this value."""
    method, optimizer = run_at(30)
    memory = next(iter(next(iter(optimizer.state.values())).values()))
    with torch.no_grad():
        (memory if of_optimizer else next(method.parameters())).view(-1)[3] = value
    return method, optimizer


def test_a_state_that_is_not_finite_is_refused_and_the_older_checkpoints_stay(folder):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for value, of_optimizer in ((math.nan, False), (math.inf, False), (math.nan, True)):
        place = r"optimizer\.state\..*" if of_optimizer else r"method\..*weight"
        with pytest.raises(DivergedError, match=f"{place} is no longer finite after step 30"):
            save(folder, 30, *spoiled(value, of_optimizer))
        assert {path: path.read_bytes() for path in folder.iterdir()} == before, place


def test_what_is_damaged_is_put_aside(folder):
    """By the seal: tests/test_files.py has every damage."""
    newest, run = latest(folder), run_at(0)
    whole = newest.read_bytes()
    aside = newest.with_name("ckpt-00000020.pt.corrupt")
    middle = len(whole) // 2
    for damaged in (whole[:middle], whole[:middle] + bytes(4096) + whole[middle + 4096 :]):
        newest.write_bytes(damaged)
        assert load(folder, *run) == Restored(10, (aside,))
        assert aside.read_bytes() == damaged
        assert not newest.exists()
    assert same(memory_of(run), memory_of(run_at(10)))


def test_one_good_checkpoint_is_enough_whether_older_or_newer_ones_are_damaged(folder):
    save(folder, 30, *run_at(30))
    (folder / "ckpt-00000010.pt").write_bytes(b"")
    assert load(folder, *run_at(0)).step == 30
    assert names(folder) == [f"ckpt-000000{step}.pt" for step in (10, 20, 30)]
    save(folder, 10, *run_at(10))
    for step in (20, 30):
        (folder / f"ckpt-000000{step}.pt").write_bytes(b"")
    restored = load(folder, *run_at(0))
    assert restored.step == 10
    corrupt = [f"ckpt-000000{step}.pt.corrupt" for step in (30, 20)]
    assert [path.name for path in restored.damaged] == corrupt


def test_a_run_never_starts_from_zero_where_every_checkpoint_is_damaged(folder):
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    run = run_at(5)
    before = memory_of(run)
    for _ in range(2):  # not the second time either
        with pytest.raises(CheckpointError, match=r"ckpt-00000020\.pt is damaged"):
            load(folder, *run)
    assert names(folder) == ["ckpt-00000010.pt", "ckpt-00000020.pt"]
    assert same(memory_of(run), before)


def test_a_hostile_file_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, marker = tmp_path / "checkpoints", tmp_path / "marker"
    folder.mkdir()
    for content in (PICKLE, zipped({"format": 1, "step": 1, "method": Runs()})):
        for file in (content, content + files.seal(content)):
            (folder / "ckpt-00000001.pt").write_bytes(file)
            with pytest.raises(CheckpointError, match=r"ckpt-00000001\.pt"):
                load(folder, *run_at(0))
            assert not marker.exists()
    pickle.loads(PICKLE)
    assert marker.exists()  # it would have


def test_a_sealed_file_of_another_program_or_a_later_format_or_a_renamed_one_is_refused(folder):
    later = zipped({"format": 2, "step": 30})
    renamed = files.read_sealed(folder / "ckpt-00000020.pt")
    unknown = "cannot be read as a checkpoint"
    for content, message in (
        (b"text", unknown),
        (pickle.dumps([1, 2]), unknown),
        (b"", unknown),
        (later, r"of format 2, nearkin .* reads 1\)"),
        (renamed, r"00000030\.pt has been renamed.*00000020\.pt$"),
    ):
        files.write_sealed(folder / "ckpt-00000030.pt", content)
        with pytest.raises(CheckpointError, match=message):
            load(folder, *run_at(0))
        assert "ckpt-00000030.pt" in names(folder), content


OTHERS = [
    (dict(name="simclr"), r"online\.projector\.1\.weight is absent there and float32\[16\] here"),
    (dict(dim=16), r"\S+ is float32\[8, 16\] there and float32\[16, 16\] here"),
    (dict(queue_size=50), r"queue\.keys is float32\[40, 8\] there and float32\[50, 8\] here"),
    (dict(optimizer="sgd"), r"its optimizer has the option clip, the one here has not"),
    (dict(optimizer="adamw"), r"parameter group 0 is \d+ parameters there and \d+ \S+ here"),
]


def test_the_state_of_another_run_is_refused_and_changes_nothing(folder):
    double = run_at(5)
    double[0].double()  # another precision is another run
    others = [(run_at(5, **other), message) for other, message in OTHERS]
    for run, message in (*others, (double, r"is float32\[.*\] there and float64\[.*\] here")):
        before = memory_of(run)
        with pytest.raises(CheckpointError, match=message) as refusal:
            load(folder, *run)
        assert len(str(refusal.value).splitlines()) == 1
        assert same(memory_of(run), before), message
        assert names(folder) == ["ckpt-00000010.pt", "ckpt-00000020.pt"]


def test_bytes_reach_the_disk_before_the_name_and_that_before_the_return(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def recorded_fsync(descriptor):
        status = os.fstat(descriptor)
        events.append(("fsync", status.st_ino, status.st_size))
        fsync(descriptor)

    def recorded_replace(source, target):
        events.append(("replace", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    path = save(tmp_path, 1, *run_at(1))
    file, folder = path.stat(), tmp_path.stat()
    assert events == [
        ("fsync", file.st_ino, file.st_size),
        ("replace", path.name),
        ("fsync", folder.st_ino, folder.st_size),
    ]


def test_what_a_dead_writer_left_is_removed(folder):
    for act in (lambda: save(folder, 20, *run_at(20)), lambda: load(folder, *run_at(20))):
        (folder / "ckpt-00000030.pt.partial.12345").write_bytes(b"half")
        act()
        assert names(folder) == ["ckpt-00000010.pt", "ckpt-00000020.pt"]


def die_at_line(number):
    """Kill this process before the given line of saving is run."""
    lines = itertools.count(1)
    writing = write_whole, inspect.unwrap(whole)
    watched = {f.__code__ for f in (checkpoint.save, checkpoint._newest_first, *writing)}

    def trace(frame, event, _):
        if frame.f_code in watched:
            if event == "line" and next(lines) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace
        return None

    sys.settrace(trace)


def kill_at_every_line(_, folder):
    outcomes, run = [], plain_at(0)
    save(folder, 1, *plain_at(1))
    for line in itertools.count(1):
        before = load(folder, *run).step
        new = plain_at(before + 1)

        def work(line=line, before=before, new=new):
            die_at_line(line)
            save(folder, before + 1, *new)

        status = os.waitpid(fork(work), 0)[1]
        if os.WIFEXITED(status):
            break
        half_written = any(files.PARTIAL in name for name in names(folder))
        after = load(folder, *run)
        assert not after.damaged, line
        assert same(memory_of(run), memory_of(plain_at(after.step))), line
        outcomes.append((after.step - before, half_written))
    assert os.WEXITSTATUS(status) == 0
    assert len(names(folder)) == 3  # the first save that lived to its end has tidied up
    progress, partial = zip(*outcomes)
    assert len(progress) > 15
    assert set(progress) == {0, 1}
    assert list(progress) == sorted(progress)  # nothing is lost again once it is there
    assert any(partial)


def test_a_kill_at_any_line_leaves_the_newest_or_the_one_before(tmp_path):
    spawn(kill_at_every_line, tmp_path, processes=1)


def fill_the_disk(_, folder):
    """Let files grow to ever more bytes, and no further."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = save(folder, 1, *plain_at(1)).stat().st_size
    says = r"cannot write the checkpoint \S+ckpt-00000002\.pt of [\d,]+ bytes.*File too large"
    run = plain_at(2)
    limits = range(0, size, size // 40)
    assert len(limits) >= 40
    for limit in limits:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(ResourceError, match=says):
            save(folder, 2, *run)
        assert names(folder) == ["ckpt-00000001.pt"]
        assert load(folder, *plain_at(0)).step == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    save(folder, 2, *run)  # there is room again
    assert load(folder, *plain_at(0)).step == 2


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(tmp_path):
    spawn(fill_the_disk, tmp_path, processes=1)
