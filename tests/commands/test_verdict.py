"""Trainings that go on from an encoder, on real digits: what they end with."""

import io
import re
import shutil
from contextlib import redirect_stdout

import pytest
from browser import opened
from nearkin_command import run

from nearkin.commands.explore import explore
from nearkin.commands.run import Run
from nearkin.encoders.encoder import load
from nearkin.run.folder import RunFolder

TOO_HIGH = 1.0


@pytest.fixture(scope="module")
def start(trained_run):
    return RunFolder(trained_run)


@pytest.fixture(scope="module")
def ruined(tmp_path_factory, digits_file, start):
    """A training that destroyed its start on purpose, by the command, with what it printed."""
    path, printed = tmp_path_factory.mktemp("runs") / "ruined", io.StringIO()
    settings = f"--lr {TOO_HIGH} --epochs 2 --batch-size 32 --augment characters"
    settings += " --optimizer adamw --device cpu --precision fp32 --report -q"
    typed = ["train", digits_file, "--encoder", start.path, "-o", path, *settings.split()]
    with redirect_stdout(printed):
        assert run(*typed) == 0
    return RunFolder(path), printed.getvalue()


def test_a_training_that_destroys_its_start_leaves_the_start_and_says_so(ruined):
    folder, printed = ruined
    comparison = folder.read_summary()["comparison"]
    assert comparison["verdict"] == "no difference"
    last = printed.splitlines()[-1]
    assert last.startswith("verdict  made no difference: kNN top-1 0.")
    assert last.endswith("(+0.000 [+0.000, +0.000])")
    assert last in folder.log.read_text()
    average = folder.read_summary()["average"]
    assert average["share"] == 0
    assert not folder.projector.exists()  # it has not learned on the features of the start
    assert average["values"]["1"] < average["values"]["0"] / 2
    assert f"average {average['text']}" in folder.log.read_text()
    by_name = {each["name"]: each for each in folder.read_summary()["differences"]["start"]}
    decisive = by_name[comparison["decided_by"]]
    assert decisive["first"] == decisive["second"]
    measures = folder.read_summary()["metrics"]
    assert list(measures) == ["encoder", "start", "untrained", "pixels"]
    assert decisive["second"] == measures["start"]["kNN top-1"]["value"]
    assert decisive["first"] == measures["encoder"]["kNN top-1"]["value"]


def test_the_start_is_the_encoder_that_training_started_from(ruined, start):
    kept, source = load(ruined[0].start), load(start.path)
    assert kept.preprocessing == source.preprocessing
    state = source.state_dict()
    assert all((tensor == state[name]).all() for name, tensor in kept.state_dict().items())
    of_start = start.read_summary()["metrics"]["encoder"]["kNN top-1"]
    again = ruined[0].read_summary()["metrics"]["start"]["kNN top-1"]
    assert again["value"] == of_start["value"]


def test_evaluate_shows_the_start_and_the_verdict_again(ruined, capsys):
    folder, printed = ruined
    assert run("evaluate", folder.path) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "frozen start" in shown[0]
    assert shown[-1] == printed.splitlines()[-1]


def test_a_training_from_random_weights_has_no_verdict(start):
    assert "comparison" not in start.read_summary()
    assert "verdict  " not in start.log.read_text()
    assert not start.start.exists()
    assert "frozen start" not in start.report.read_text()


def first_step(folder):
    return re.findall(r"<code>(nearkin [a-z]+ [^<]*)</code>", folder.report.read_text())[1]


def test_the_page_advises_the_better_encoder(ruined, tmp_path):
    """That of a run whose average finds views more often, and classes less often, is its start."""
    explore(ruined[0].path, output=tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == ruined[0].report.read_bytes()
    assert not first_step(ruined[0]).startswith("nearkin embed")
    worse = RunFolder(shutil.copytree(ruined[0].path, tmp_path / "worse"))
    summary = dict(worse.read_summary())
    for each in summary["differences"]["start"]:
        each.update(first=each["second"] - 0.2, low=-0.3, high=-0.1)
    worse.write_summary(summary)
    explore(worse.path, write=True)
    assert first_step(worse).startswith(f"nearkin embed {worse.start} ")
    (last,) = Run(worse).lines()[-1:]
    assert last.startswith("verdict  made it worse: kNN top-1 0.")
    assert last.endswith(f"; use the start: {worse.start}")
    assert "verdict: decided by kNN top-1, " in worse.report.read_text()
    summary["differences"]["start"] = []  # as of a single image without a label
    summary["comparison"]["decided_by"] = None
    worse.write_summary(summary)
    explore(worse.path, write=True)
    assert "verdict: decided by" not in worse.report.read_text()


def test_in_a_browser_the_verdict_comes_first_and_the_start_is_a_column(ruined, browser):
    with opened(browser, ruined[0].report) as page:
        summary = page.locator("section", has=page.get_by_role("heading", name="Summary"))
        text = ruined[0].read_summary()["comparison"]["text"]
        assert summary.locator("p").first.inner_text() == f"Training {text}."
        assert "not the seed of the training" in summary.inner_text()
        assert page.locator("th", has_text="frozen start").first.is_visible()
