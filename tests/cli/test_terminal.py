"""What people see: real commands on pseudo-terminals, in pipes, and where only ASCII goes."""

import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import builders
import kills
import numpy as np
import pytest
from nearkin_command import run

from nearkin.cli.terminal import Terminal, err, progress_line
from nearkin.pace import MARKS, Pace, tracked, under
from nearkin.training import fit

PLAIN = {"NO_COLOR", "CI", "FORCE_COLOR", "TERM"}


def on_terminal(work, *, columns, interrupt="", encoding="utf-8", **env):
    """The exit code of a process on a terminal, where Ctrl-C follows `interrupt`, and its text."""
    child, ours = pty.fork()
    if not child:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        _at_a_terminal(work, encoding, {"TERM": "xterm"} | env)
    written = b""
    while piece := _read(ours):
        written += piece
        if interrupt and interrupt in written.decode(errors="replace"):
            os.write(ours, b"\x03")
            interrupt = ""
    os.close(ours)
    return kills.finish(child), written.decode()


def _at_a_terminal(work, encoding, env):
    """Call a function as all that a new process does, and end with its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # `make test &` ignores it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the limit of the test is not for this process
    signal.alarm(kills.PATIENCE)
    for name in PLAIN & os.environ.keys():
        del os.environ[name]
    os.environ.update(env)
    err.is_interactive = True  # which rich decides when it is imported
    code = 1
    try:
        sys.stdout = os.fdopen(1, "w", encoding=encoding)
        sys.stderr = os.fdopen(2, "w", encoding=encoding, errors="backslashreplace")
        code = work()
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # or the tests would go on twice


def _read(terminal):
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux says so where others say that there is no more
        return b""


def steps(fail=False):
    """What a command does."""
    with Terminal() as terminal:
        terminal.info("é\x1b[31m.png, :smile: [red]")
        for done in range(5):
            time.sleep(0.11)
            terminal.progress(done, 5, f"epoch {done + 1}/5  loss 1.234  é")
        if fail:
            raise RuntimeError("a bug")
    return 0


def screen(written, columns):
    """The lines that stand on a terminal in the end, whether a line has wrapped, and the cursor."""
    rows, row, column, wrapped, visible = [""], 0, 0, False, True
    for control, letter in re.findall(r"\x1b\[([0-9;?]*[A-Za-z])|(.)", written, re.DOTALL):
        if control == "2K":
            rows[row] = ""
        elif control.endswith("A"):
            row -= int(control[:-1])
        elif control in ("?25l", "?25h"):
            visible = control == "?25h"
        elif control:
            assert control.endswith("m"), control
        elif letter == "\r":
            column = 0
        elif letter == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        else:
            rows[row] = rows[row][:column].ljust(column) + letter + rows[row][column + 1 :]
            column += 1
            wrapped |= column >= columns and letter in "━─"
    return rows, wrapped, visible


def drawn(written):
    """All lines that were drawn anew, without their colors."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written)
    return re.findall(r"\x1b\[2K( *\d+% [^\r\n\x1b]*)", plain)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "data.npz"
    np.savez(path, x=builders.pixels(96, 8))
    return path


@pytest.fixture(scope="module")
def trainings(data, tmp_path_factory):
    """Real trainings: a whole one on a narrow terminal, a stopped on a wide."""
    out = tmp_path_factory.mktemp("runs")
    stopped = partial(train, data, out / "stopped", 10_000)
    return {
        60: on_terminal(partial(train, data, out / "whole", 4), columns=60),
        120: on_terminal(stopped, columns=120, interrupt="epoch 2/"),
    }


def train(data, out, epochs, pause=0.0):
    settings = ["--batch-size", 8, "--evaluate-every", 4, "--backbone", "tiny"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "PAUSE", pause)  # or the lines would depend on the machine
        return run("train", data, *settings, "--epochs", epochs, "-o", out)


@pytest.mark.parametrize("columns", [60, 120])
def test_a_training_draws_a_line_that_fits_and_leaves_nothing_of_it(trainings, columns):
    lines = drawn(trainings[columns][1])
    assert all(len(line) < columns for line in lines)
    whole = r" *\d+% [━─]{4,40}  epoch \d+/\d+  loss \d\.\d{3}  [\d:]+ left  \d+(\.\d)? img/s"
    assert any(re.match(whole, line) for line in lines)
    rows, wrapped, visible = screen(trainings[columns][1], columns)
    assert not wrapped
    assert visible
    assert not [row for row in rows if "━" in row or "─" in row]


def test_a_whole_training_leaves_its_lines_in_order(trainings):
    code, written = trainings[60]
    rows, _, _ = screen(written, 60)
    assert code == 0
    assert [row.split("  ")[0] for row in rows if row.startswith("epoch")] == [
        f"epoch {number}/4" for number in range(1, 5)
    ]
    assert rows[-2].startswith("clusters: not measured")
    assert any(re.search("a look at the encoder|encoder: ", line) for line in drawn(written))


def test_ctrl_c_leaves_one_line_that_says_how_to_go_on(trainings):
    code, written = trainings[120]
    rows, _, _ = screen(written, 120)
    assert code == 130
    assert any(line.endswith(" so far") for line in drawn(written))
    assert rows[-2].startswith("error: stopped by SIGINT after step")


def test_what_is_no_terminal_gets_a_line_per_epoch_and_no_escape_sequence(
    data, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert train(data, tmp_path / "run", 2) == 0
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err
    assert "\r" not in out + err
    assert [line.split("  ")[0] for line in err.splitlines() if "img/s" in line] == [
        f"epoch {number}/2" for number in range(1, 3)
    ]
    assert train(data, tmp_path / "joined", 3, pause=1e9) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "img/s" in line]
    assert [line.split("  ")[0] for line in lines] == ["epoch 3/3"]


def test_a_terminal_that_is_asked_to_be_plain_gets_plain_lines():
    for env in ({"TERM": "dumb"}, {"NO_COLOR": "1"}, {"CI": "true"}):
        code, written = on_terminal(steps, columns=80, **env)
        assert (code, written) == (0, "é\\x1b[31m.png, :smile: [red]\r\n"), env


def test_where_only_ascii_goes_only_ascii_is_drawn():
    code, written = on_terminal(steps, columns=60, encoding="ascii")
    assert code == 0, written
    assert written.isascii()
    assert any(re.match(r" 40% #+-+  epoch 3/5  loss 1\.234", line) for line in drawn(written))
    assert "".join(screen(written, 60)[0]) == "\\xe9\\x1b[31m.png, :smile: [red]"


def test_an_error_leaves_nothing_of_the_line():
    code, written = on_terminal(partial(steps, fail=True), columns=60)
    rows, wrapped, visible = screen(written, 60)
    assert code == 1
    assert drawn(written)
    assert visible
    assert not wrapped
    assert rows[1] == "Traceback (most recent call last):"
    assert rows[-2] == "RuntimeError: a bug"


def test_names_that_an_encoding_cannot_spell_are_escaped(tmp_path, monkeypatch):
    builders.fill(tmp_path, "a.png", "b.png")
    (tmp_path / "é.png").write_bytes(b"no image")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert run("check", tmp_path) == 0
    sys.stdout.flush()
    assert b"\\xe9.png: text, not an image" in sys.stdout.buffer.getvalue()


def test_a_line_fits_into_any_width_and_keeps_what_comes_first():
    text = "epoch 123/200  loss 1.234  41:12:10 left  5230 img/s  1:03:20 so far"
    for ascii_only in (False, True):
        for width in range(1, 140):
            written = progress_line(17, 23, text, width, ascii_only=ascii_only).plain
            assert len(written) <= width
            assert written.isascii() == ascii_only or width <= 5
            parts = re.split(r"  +", written.strip())[1:]
            assert parts == text.split("  ")[: len(parts)]
        assert parts == text.split("  ")
        assert written.startswith(" 73% ")


def test_only_the_last_steps_made_now_and_no_pauses_count_for_speed(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("nearkin.pace.time", SimpleNamespace(perf_counter=lambda: clock.now))
    pace = Pace(1000, images=8)
    clock.now = 30.0  # the first step warms up
    assert pace.reach(901) == ["0:30 so far"]  # 900 were made by an earlier start
    for done in range(902, 911):
        clock.now += 2.0
        texts = pace.reach(done)
        with pace.paused():
            clock.now += 100.0
    assert texts == ["3:00 left", "4.0 img/s", "14:08 so far"]
    clock.now += 2.0
    assert pace.reach(911)[:2] == ["2:58 left", "4.0 img/s"]
    pace = Pace(10_000)
    for done in range(1, 101):
        clock.now += 10.0
        pace.reach(done)
    for done in range(101, 101 + MARKS):
        clock.now += 1.0
        pace.reach(done)
    assert pace.speed[1] == "1.0 img/s"


def test_what_is_tracked_is_told_after_each_batch_and_unchanged():
    log = []
    on_progress = under("part 1 of 2", lambda *progress: log.append(progress))
    batches = [[1, 2, 3], [4, 5]]
    assert list(tracked(batches, 5, "features", on_progress)) == batches
    assert [(done, total) for done, total, _ in log] == [(3, 5), (5, 5)]
    assert all(text.startswith("part 1 of 2: features") for _, _, text in log)


def test_a_reader_that_goes_away_ends_nothing():
    for work, code in (steps, 0), (partial(run, "rank"), 2):
        reading, writing = os.pipe()
        os.close(reading)
        if not (child := os.fork()):
            os.dup2(writing, 2)
            _at_a_terminal(work, "utf-8", {})
        os.close(writing)
        assert kills.finish(child) == code


@pytest.mark.parametrize("words", [["list", "methods"], ["train", "--help-all"]])
def test_what_cannot_be_printed_decides_the_exit_code_only_where_it_is_lost(words):
    """A reader has heard enough; a full disk, which the system has as a file, has taken nothing."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "nearkin", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=True)
    os.close(writing)
    assert done.stderr == b""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    says = b"error: no room left to write the output; make room, then try again\n"
    assert (done.returncode, done.stderr) == (8, says)


CLOSED = """
import os, sys
from nearkin.cli import main
assert main(["--version"]) == 0
assert main(["train", "--bogus"]) == 2
assert main(["train", "--\\u00e9"]) == 2
assert os.path.samestat(os.stat(os.devnull), os.fstat(2))
"""


def test_no_file_is_opened_in_the_place_of_a_closed_stream():
    """And nothing that belongs there is printed elsewhere."""
    command = [sys.executable, "-c", CLOSED]
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    close = lambda: os.close(2)
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env=ascii_only, preexec_fn=close, check=True
    )
    assert re.fullmatch(rb"[\d.]+\n", done.stdout)


def evaluating():
    with Terminal() as terminal:
        for done in range(1000):
            time.sleep(0.1)
            terminal.progress(done, 1000, "features")


def test_an_interrupt_during_an_evaluation_clears_the_line():
    code, written = on_terminal(evaluating, columns=60, interrupt="features")
    rows, _, visible = screen(written, 60)
    assert code == 130
    assert visible
    assert not [row for row in rows if "━" in row]


IMPORTS = """
import os
before = {**os.environ}
import nearkin
nearkin.train, nearkin.load, nearkin.View
import torch
assert {**os.environ} == before
"""


def test_waiting_threads_leave_their_cores_to_other_work_unless_told_otherwise():
    """And no variable of the process is changed for it."""
    usual = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", IMPORTS]
    for asked, policy in ({}, b"PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, b"ACTIVE"):
        env = usual | {"OMP_DISPLAY_ENV": "true"} | asked
        done = subprocess.run(command, capture_output=True, env=env, check=True)
        assert b"OMP_WAIT_POLICY = '" + policy in done.stderr
