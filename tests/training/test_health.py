"""Whether collapse is told from health: on vectors whose geometry is known."""

import itertools
import math
import re
import signal
from dataclasses import replace

import pytest
import torch
from builders import normal, pixels
from discoveries import bytes_of
from kills import resumed_steps

from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.errors import CollapsedError, DivergedError, StoppedError
from nearkin.method import HealthBounds
from nearkin.methods.byol import BYOL
from nearkin.run.folder import RunFolder
from nearkin.training.checkpoint import latest
from nearkin.training.health import (
    PATIENCE,
    SETTLED,
    Alarm,
    Monitor,
    health,
    verdict,
    violations,
)

SOUND = dict(effective_rank=30.0, directions=64.0, feature_std=0.98, mean_cosine=0.02)


def test_vectors_in_all_directions_are_healthy():
    measures = health(normal(2000, 32))
    assert measures["directions"] == 32
    assert measures["effective_rank"] == pytest.approx(32, rel=0.05)
    assert measures["feature_std"] == pytest.approx(1, rel=0.01)
    assert measures["mean_cosine"] == pytest.approx(0, abs=0.01)
    assert not violations(measures, BYOL)
    assert verdict(measures, BYOL).startswith("healthy: the embeddings use 32 of 32 directions")


def test_vectors_in_few_directions_around_one_point_or_all_alike_have_collapsed():
    few = health(normal(500, 3) @ torch.linalg.qr(normal(64, 3))[0].T)
    assert few["effective_rank"] == pytest.approx(3, rel=0.1)
    assert verdict(few, BYOL).startswith("collapsed: the embeddings use 3 of 64 directions")
    assert "effective rank below 5; try a lower learning rate" in verdict(few, BYOL)
    around = health(normal(500, 32) + 2.0)  # in all directions
    assert around["effective_rank"] > 0.5 * around["directions"]
    assert around["mean_cosine"] == pytest.approx(4 / 5, rel=0.02)
    alike = health(torch.ones(16, 8))
    assert alike["feature_std"] == pytest.approx(0, abs=1e-6)
    assert all(violations(measures, BYOL) for measures in (around, alike))


def test_any_one_sign_is_enough():
    for change, expected in [
        ({}, False), (dict(effective_rank=5.1), True), (dict(effective_rank=5.2), False),
        (dict(feature_std=0.64), True), (dict(feature_std=0.66), False),
        (dict(mean_cosine=0.56), True), (dict(mean_cosine=0.54), False),
        (dict(mean_cosine=-0.9), False), (dict(effective_rank=math.nan), True),
    ]:  # fmt: skip
        assert bool(violations(SOUND | change, BYOL)) is expected, change


def test_small_batches_are_measured_by_the_directions_they_can_use():
    assert health(normal(8, 128))["directions"] == 8
    assert not violations(health(normal(64, 128)), BYOL)


def test_neither_lengths_nor_half_precision_change_what_is_measured():
    x, lengths = normal(100, 8).requires_grad_(), torch.linspace(0.1, 9, 100)[:, None]
    assert health(x * lengths) == pytest.approx(health(x), rel=1e-4, abs=1e-5)
    assert health(x.bfloat16()) == pytest.approx(health(x), abs=0.05)
    assert torch.equal(x, normal(100, 8))


def test_embeddings_that_are_not_finite_have_diverged():
    x = normal(20, 8)
    x[3, 2] = math.nan
    with pytest.raises(DivergedError, match="no longer finite"):
        health(x)


# The alarm

ALIKE = SOUND | dict(feature_std=0.02, mean_cosine=0.99)


def alarms(evaluations, start=SETTLED):
    """What an alarm returns after each of these evaluations."""
    alarm = Alarm(BYOL)
    return [alarm.update(each, start + 0.01 * number) for number, each in enumerate(evaluations)]


def test_three_evaluations_in_a_row_are_reported_and_a_healthy_one_starts_the_count_anew():
    assert PATIENCE == 3
    reports = alarms([SOUND, ALIKE, ALIKE, ALIKE, ALIKE, ALIKE])
    assert [bool(text) for text in reports] == [False, False, False, True, True, True]
    assert "spread below 0.65 and mean cosine above 0.55" in reports[3]
    assert not any(alarms([ALIKE, ALIKE, SOUND, ALIKE, ALIKE, SOUND]))
    assert any(alarms([ALIKE, ALIKE, SOUND, ALIKE, ALIKE, ALIKE]))


def test_what_is_alike_before_it_has_learned_is_no_collapse():
    assert not any(alarms([ALIKE] * 20, start=0.0))
    assert any(alarms([ALIKE] * 20, start=SETTLED - 0.1))


def test_a_spread_that_rises_is_no_collapse_but_one_that_fluctuates_or_a_rank_that_rises_is():
    rising = [SOUND | dict(feature_std=std) for std in (0.3, 0.36, 0.42, 0.47, 0.52, 0.57, 0.62)]
    assert not any(alarms(rising))
    assert any(alarms(rising[:1] * 4))
    assert any(alarms(rising[::-1]))
    assert any(alarms([ALIKE | dict(feature_std=std) for std in (0.02, 0.05, 0.03, 0.06)]))
    assert any(alarms([ALIKE | dict(effective_rank=float(rank)) for rank in range(1, 6)]))


def collapsing(out, resume=False, **settings):
    """A run whose weights decay to nothing."""
    config = TrainConfig(
        backbone="tiny", image_size=16, batch_size=16, epochs=7, evaluate_every=1, lr=0.05,
        optimizer="adamw", weight_decay=19.0, save_every=1000, report=False, **settings,
    )  # fmt: skip
    return train(pixels(64), config, output=out, resume=resume)


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory):
    return collapsing(tmp_path_factory.mktemp("collapsed") / "run")


def test_a_run_that_collapses_says_so_and_goes_on(collapsed):
    log = (collapsed.path / "train.log").read_text()
    assert log.count("warning: collapsed: the embeddings use") == 1
    assert collapsed.summary["health"]["feature_std"] < 0.65


def test_a_run_that_is_to_stop_on_it_saves_first_and_can_go_on(collapsed, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(CollapsedError, match=r"collapsed: .*; stopped after step (\d+)") as error:
        collapsing(out, on_collapse="stop")
    assert error.value.exit_code == 7
    step = int(re.search(r"after step (\d+)", str(error.value))[1])
    assert latest(out / "checkpoints").name == f"ckpt-{step:08d}.pt"
    warned = replace(RunFolder(out).settings()[0], on_collapse="warn")
    train(pixels(64), warned, output=out, resume=True)
    assert resumed_steps(out) == [step]
    files = ("encoder.safetensors", "metrics.csv")
    assert bytes_of(out, *files) == bytes_of(collapsed.path, *files)


def test_a_run_in_pieces_stops_after_the_step_where_an_unbroken_one_does(tmp_path, monkeypatch):
    """With two evaluations in a piece, no third one in a row had ever come."""
    with pytest.raises(CollapsedError) as unbroken:
        collapsing(tmp_path / "whole", on_collapse="stop")
    evaluate, evaluations = Monitor.evaluate, itertools.count(1)

    def interrupted(monitor, method):
        if next(evaluations) % 2 == 0:
            signal.raise_signal(signal.SIGINT)
        return evaluate(monitor, method)

    monkeypatch.setattr(Monitor, "evaluate", interrupted)
    out = tmp_path / "parts"
    with pytest.raises(StoppedError):
        collapsing(out, on_collapse="stop")
    with pytest.raises(CollapsedError) as broken:
        collapsing(out, on_collapse="stop", resume=True)
    assert str(broken.value) == str(unbroken.value)
    with pytest.raises(CollapsedError):  # nothing has become better
        collapsing(out, on_collapse="stop", resume=True)


def test_a_method_of_ones_own_declares_its_bounds():
    class Own(BYOL):
        health_bounds = HealthBounds(min_rank=0.5, max_cosine=1.0)

    alike = SOUND | dict(mean_cosine=0.9)
    assert list(violations(alike, BYOL)) == ["mean cosine above 0.55"]
    assert list(violations(alike, Own)) == ["effective rank below 32"]
