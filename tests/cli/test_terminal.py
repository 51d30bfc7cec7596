"""What people see: real commands on pseudo-terminals, in pipes, and where only ASCII goes."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from threading import Timer

import numpy as np
import pytest
from nearkin_command import run
from PIL import Image
from processes import SECONDS

from nearkin.cli.terminal import Standing
from nearkin.pace import MARKS, Pace, tracked, under

PLAIN = {"NO_COLOR", "CI", "FORCE_COLOR", "TERM", "COLUMNS", "PYTHONIOENCODING"}
COMMAND = [sys.executable, "-m", "nearkin"]
STEPS = """
import sys, time
from nearkin.cli.terminal import Terminal
with Terminal() as terminal:
    terminal.info("é\x1b[31m.png, :smile: [red]")
    for done in range(5):
        time.sleep(0.11)
        terminal.progress(done, 5, f"epoch {done + 1}/5  loss 1.234  é")
    if sys.argv[1:]:
        raise RuntimeError("a bug")
"""


def environment(**changes):
    usual = {name: value for name, value in os.environ.items() if name not in PLAIN}
    return usual | {"PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"} | changes


def on_terminal(command, *, columns, interrupt="", **env):
    """The exit code of a command on a terminal, and what it has written there.

    Once it has written the text `interrupt`, Ctrl-C is typed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=environment(**{"TERM": "xterm"} | env),
        preexec_fn=_with_a_keyboard,
    )  # fmt: skip
    os.close(theirs)
    overdue = Timer(SECONDS, process.kill)
    overdue.start()
    written = b""
    while piece := _read(ours):
        written += piece
        if interrupt and interrupt in written.decode(errors="replace"):
            os.write(ours, b"\x03")
            interrupt = ""
    os.close(ours)
    overdue.cancel()
    return process.wait(), written.decode()


def _with_a_keyboard():
    """Ctrl-C reaches a program that was started where it is ignored, too, as by `make test &`."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _read(terminal):
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux says so where others say that there is no more
        return b""


def in_pipe(command, **env):
    done = subprocess.run(command, capture_output=True, env=environment(**env))
    return done.returncode, done.stdout.decode(), done.stderr.decode()


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
    rng = np.random.default_rng(0)
    np.savez(path, x=rng.integers(0, 256, (96, 8, 8, 3), dtype=np.uint8), y=np.arange(96) % 3)
    return path


@pytest.fixture(scope="module")
def trainings(data, tmp_path_factory):
    """Real trainings, at the same time: a whole one on a narrow terminal, a stopped on a wide."""
    out = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(on_terminal, train(data, out / "whole", 8), columns=60)
        command = train(data, out / "stopped", 10_000)
        stopped = pool.submit(on_terminal, command, columns=120, interrupt="epoch 2/")
    return {60: whole.result(), 120: stopped.result()}


def train(data, out, epochs):
    settings = ["--batch-size", "8", "--evaluate-every", "8", "--backbone", "tiny"]
    return [*COMMAND, "train", str(data), *settings, "--epochs", str(epochs), "-o", str(out)]


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
        f"epoch {number}/8" for number in range(1, 9)
    ]
    assert rows[-3].startswith("neighbor agreement")
    assert rows[-2].startswith("alpha-ReQ: not measured, ")
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
    assert run(*train(data, tmp_path / "run", 3)[3:]) == 0
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err
    assert "\r" not in out + err
    assert [line.split("  ")[0] for line in err.splitlines() if "img/s" in line] == [
        f"epoch {number}/3" for number in range(1, 4)
    ]


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"NO_COLOR": "1"}, {"CI": "true"}])
def test_a_terminal_that_is_asked_to_be_plain_gets_plain_lines(env):
    code, written = on_terminal([sys.executable, "-c", STEPS], columns=80, **env)
    assert (code, written) == (0, "é\\x1b[31m.png, :smile: [red]\r\n")


def test_where_only_ascii_goes_only_ascii_is_drawn():
    code, written = on_terminal(
        [sys.executable, "-c", STEPS], columns=60, PYTHONIOENCODING="ascii:strict"
    )
    assert code == 0, written
    assert written.isascii()
    assert any(re.match(r" 40% #+-+  epoch 3/5  loss 1\.234", line) for line in drawn(written))
    assert "".join(screen(written, 60)[0]) == "\\xe9\\x1b[31m.png, :smile: [red]"


def test_an_error_leaves_nothing_of_the_line():
    code, written = on_terminal([sys.executable, "-c", STEPS, "fail"], columns=60)
    rows, wrapped, visible = screen(written, 60)
    assert code == 1
    assert drawn(written)
    assert visible
    assert not wrapped
    assert rows[1] == "Traceback (most recent call last):"
    assert rows[-2] == "RuntimeError: a bug"


def test_names_that_an_encoding_cannot_spell_are_escaped(tmp_path):
    for name in ("a.png", "b.png"):
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / name)
    (tmp_path / "é.png").write_bytes(b"no image")
    code, out, _ = in_pipe([*COMMAND, "check", str(tmp_path)], PYTHONIOENCODING="ascii")
    assert code == 0
    assert "\\xe9.png: not-an-image" in out


@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_line_fits_into_any_width_and_keeps_what_comes_first(ascii_only):
    text = "epoch 123/200  loss 1.234  41:12:10 left  5230 img/s  1:03:20 so far"
    for width in range(1, 140):
        written = Standing(17, 23, text).line(width, ascii_only=ascii_only).plain
        assert len(written) <= width
        assert written.isascii() == ascii_only or width <= 5
        parts = re.split(r"  +", written.strip())[1:]
        assert parts == text.split("  ")[: len(parts)]
    assert parts == text.split("  ")
    assert written.startswith(" 73% ")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_only_steps_made_now_and_no_pauses_count_for_speed():
    clock = Clock()
    pace = Pace(1000, images=8, clock=clock)
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


def test_speed_is_that_of_the_last_steps():
    clock = Clock()
    pace = Pace(10_000, clock=clock)
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


def test_an_interrupt_during_an_evaluation_clears_the_line(tmp_path):
    code, written = on_terminal(
        [sys.executable, "-c", INTERRUPTED], columns=60, interrupt="features"
    )
    rows, _, visible = screen(written, 60)
    assert code == 130
    assert visible
    assert not [row for row in rows if "━" in row]


INTERRUPTED = """
import sys, time
from nearkin.cli.terminal import Terminal
try:
    with Terminal() as terminal:
        for done in range(1000):
            time.sleep(0.1)
            terminal.progress(done, 1000, "features")
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(
    ("command", "requested", "policy"),
    [
        ([*COMMAND, "doctor"], {}, b"PASSIVE"),
        (
            [sys.executable, "-c", "import nearkin, torch"],
            {"OMP_WAIT_POLICY": "ACTIVE"},
            b"ACTIVE",
        ),
    ],
)
def test_waiting_threads_leave_their_cores_to_other_work_unless_told_otherwise(
    command, requested, policy
):
    env = {k: v for k, v in environment().items() if k != "OMP_WAIT_POLICY"}
    env |= {"OMP_DISPLAY_ENV": "true"} | requested
    done = subprocess.run(command, capture_output=True, env=env, check=True)
    assert b"OMP_WAIT_POLICY = '" + policy in done.stderr
