"""Trainings that go on from an encoder, on real digits: what they end with."""

import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from browser import chromium, in_a_browser
from processes import SECONDS, environment
from sklearn.datasets import load_digits

from nearkin.cli import main
from nearkin.commands.report import write_report
from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.encoders.encoder import load
from nearkin.run.folder import RunFolder

SETTINGS = TrainConfig(
    backbone="tiny",
    image_size=16,
    batch_size=50,
    epochs=1,
    augment="characters",
    optimizer="adamw",
    device="cpu",
)
TOO_HIGH, NO_RATE = 30.0, 1e-8


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Digits: 400 to train on, 400 to test."""
    digits = load_digits()
    x, y = np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    np.savez(path, x_train=x[:400], y_train=y[:400], x_test=x[400:800], y_test=y[400:800])
    return path


@pytest.fixture(scope="module")
def start(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("runs") / "start"
    return train(str(data), replace(SETTINGS, epochs=15, evaluate_every=0), out=path).folder


@pytest.fixture(scope="module")
def ruined(tmp_path_factory, data, start):
    """A training that was made worse on purpose, by the command, with what it printed."""
    path = tmp_path_factory.mktemp("runs") / "ruined"
    typed = f"train {data} --init-from {start.path} --lr {TOO_HIGH} --epochs 4 --batch-size 50"
    typed += f" --augment characters --optimizer adamw --device cpu --out {path}"
    command = [sys.executable, "-m", "nearkin", *typed.split(), "-q"]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return RunFolder(path), ended.stdout


def test_a_training_that_made_it_worse_ends_with_that_and_names_the_start(ruined):
    folder, printed = ruined
    comparison = folder.read_summary()["comparison"]
    assert comparison["verdict"] == "worse"
    last = printed.splitlines()[-1]
    assert last.startswith("verdict  made it worse: kNN top-1 0.")
    assert last.endswith(f"; use the start: {folder.start}")
    assert last in folder.log.read_text()
    by_name = {each["measure"]: each for each in comparison["differences"]}
    decisive = by_name[comparison["decided_by"]]
    assert decisive["difference"] < decisive["high"] < 0
    measures = folder.read_summary()["measures"]
    assert list(measures) == ["encoder", "start", "untrained", "pixels"]
    assert decisive["start"] == measures["start"]["kNN top-1"]["value"]
    assert decisive["encoder"] == measures["encoder"]["kNN top-1"]["value"]


def test_the_start_is_the_encoder_that_training_started_from(ruined, start):
    kept, source = load(ruined[0].start), load(start.path)
    assert kept.preprocessing == source.preprocessing
    state = source.state_dict()
    assert all((tensor == state[name]).all() for name, tensor in kept.state_dict().items())
    of_start = start.read_summary()["measures"]["encoder"]["kNN top-1"]
    again = ruined[0].read_summary()["measures"]["start"]["kNN top-1"]
    assert again["value"] == of_start["value"]


def test_evaluate_shows_the_start_and_the_verdict_again(ruined, capsys):
    folder, printed = ruined
    assert main(["evaluate", str(folder.path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "frozen start" in shown[0]
    assert shown[-1] == printed.splitlines()[-1]


@pytest.mark.slow
def test_a_training_that_did_nothing_made_no_difference(tmp_path, data, start):
    settings = replace(SETTINGS, init_from=str(start.path), lr=NO_RATE)
    run = train(str(data), settings, out=tmp_path / "run")
    assert run.summary["comparison"]["verdict"] == "no difference"
    last = run.lines()[-1]
    assert last.startswith("verdict  made no difference: kNN top-1")
    assert "use the start" not in last
    assert "nearkin embed" not in _first_step(run.folder)


@pytest.mark.slow
def test_without_labels_only_harm_is_known(tmp_path, data, start):
    def verdict(name, **settings):
        config = replace(SETTINGS, init_from=str(start.path), labels="none", **settings)
        run = train(str(data), config, out=tmp_path / name)
        assert set(run.summary["left_out"]) == {"kNN top-1", "linear probe", "clusters"}
        assert run.summary["comparison"]["decided_by"] == "view retrieval"
        return run.summary["comparison"]["verdict"], run.lines()[-1]

    known, line = verdict("ruined", lr=TOO_HIGH)
    assert known == "worse"
    assert "use the start" in line
    known, line = verdict("nothing", lr=NO_RATE)
    assert known == "unknown"
    assert "cannot be known without labeled test images" in line


def test_a_training_from_random_weights_has_no_verdict(start):
    assert "comparison" not in start.read_summary()
    assert "verdict  " not in start.log.read_text()
    assert not start.start.exists()
    assert "frozen start" not in start.report.read_text()


def _first_step(folder):
    return re.findall(r"<code>(nearkin [a-z]+ [^<]*)</code>", folder.report.read_text())[1]


def test_the_page_advises_the_better_encoder(ruined):
    assert _first_step(ruined[0]).startswith(f"nearkin embed {ruined[0].start} ")
    page = ruined[0].report.read_bytes()
    ruined[0].report.unlink()
    write_report(ruined[0].path)
    assert ruined[0].report.read_bytes() == page


class TestInABrowser:
    pytestmark = in_a_browser

    def test_the_verdict_comes_first_and_the_start_is_a_column_and_a_level_line(self, ruined):
        with chromium() as browser:
            page = browser.new_page()
            complaints = []
            page.on("console", lambda message: complaints.append(message.text))
            page.goto(ruined[0].report.as_uri())
            summary = page.locator("section", has=page.get_by_role("heading", name="Summary"))
            text = ruined[0].read_summary()["comparison"]["text"]
            assert summary.locator("p").first.inner_text() == f"Training {text}."
            assert "not the seed of the training" in summary.inner_text()
            headings = page.locator("th", has_text="frozen start")
            assert headings.first.is_visible()
            legend = page.locator(".legend", has_text="frozen start")
            assert legend.is_visible()
            assert "kNN accuracy" in legend.inner_text()
            assert complaints == []
