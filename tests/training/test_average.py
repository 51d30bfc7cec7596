"""The average of start and end that a continued training leaves, and how it is chosen."""

import json
import re

import numpy as np
import pytest
import torch
from builders import write_network

import nearkin
from nearkin.encoders.encoder import load
from nearkin.metrics.metric import share
from nearkin.run.folder import RunFolder
from nearkin.training.average import SHARES, averaged, choose_average

HELD_OUT = "held-out images"


@pytest.fixture
def ends(tmp_path):
    """Two encoders of one network, with statistics that differ."""
    both = [load(write_network(tmp_path / f"{seed}.safetensors", seed=seed)) for seed in (1, 2)]
    both[1].backbone.body(torch.randn(8, 3, 16, 16))
    return both


def test_weights_and_statistics_are_averaged_one_by_one(ends):
    start, end = ends
    before, after = (
        {key: value.clone() for key, value in each.backbone.body.state_dict().items()}
        for each in ends
    )
    between = averaged(start, after, 0.25).backbone.body.state_dict()
    assert between.keys() == before.keys()
    for key, value in between.items():
        expected = after[key]
        if value.is_floating_point():
            expected = 0.75 * before[key] + 0.25 * after[key]
        torch.testing.assert_close(value, expected)
        assert torch.equal(start.backbone.body.state_dict()[key], before[key])
    assert averaged(start, after, 1.0).digest == end.digest


def test_a_tensor_under_several_names_is_averaged_once(ends):
    start, end = ends
    for each in ends:
        each.backbone.body = torch.nn.Sequential(*[torch.nn.Linear(3, 3)] * 4)
    before, after = (each.backbone.body[0].weight.detach().clone() for each in ends)
    between = averaged(start, end.backbone.body.state_dict(), 0.25).backbone.body
    torch.testing.assert_close(between[0].weight, 0.75 * before + 0.25 * after)


def chosen(ends, right, n=200):
    """The choice where so many of `n` images are right, with the start's first."""
    start, end = ends
    given = iter(right)

    def measure(_):
        if (number := next(given)) is None:
            return {}
        outcome = share("view retrieval", np.arange(n) < number, {}, rows=np.arange(n))
        return {"view retrieval": outcome}

    kept, average = choose_average(start, start, end.backbone.body.state_dict(), measure, HELD_OUT)
    measured = [at for at, number in zip((0.0, *SHARES), right, strict=True) if number is not None]
    assert list(average.retrieval) == measured
    assert (kept is start) == (average.share == 0)
    return average


def test_the_start_is_kept_unless_an_average_is_clearly_better(ends):
    """One of 200 images more is not clear, by the paired interval; twenty are."""
    assert chosen(ends, (100, 101, 101, 101, 101)).share == 0
    assert chosen(ends, (100, 90, 80, 70, 60)).share == 0
    assert chosen(ends, (100, 101, 120, 130, 125)).share == 0.75
    assert chosen(ends, (100, 101, 120, 120, 101)).share == 0.5  # of equals, nearer to the start
    average = chosen(ends, (100, 120, 130, 140, 150))
    assert average.share == 1
    assert average.to_dict()["values"] == {
        "0": 0.5, "0.25": 0.6, "0.5": 0.65, "0.75": 0.7, "1": 0.75,
    }  # fmt: skip
    assert "0.500 at 0, 0.600 at 0.25" in average.text
    assert "200 held-out images" in average.text


def test_an_average_that_cannot_be_measured_is_not_chosen(ends):
    assert chosen(ends, (100, None, 150, 90, 80)).share == SHARES[1]


def test_what_cannot_be_measured_stays_as_it_was(ends):
    start, end = ends
    kept, average = choose_average(
        start, start, end.backbone.body.state_dict(), lambda _: {}, HELD_OUT
    )
    assert kept is start
    assert average.share == 0
    assert "too few images" not in average.text
    assert "so few images" in average.text


def test_a_training_that_spoils_its_start_leaves_the_start(tmp_path, log):
    """At its own size and preprocessing, and the run says so."""
    source = write_network(tmp_path / "start.safetensors")
    pixels = np.random.default_rng(0).integers(0, 256, (80, 12, 12, 3), np.uint8)
    how = dict(encoder=source, batch_size=16, epochs=2, lr=1.0, anchor=0.0, verbose=log)
    run = nearkin.train(pixels, output=tmp_path / "run", image_size=12, report=True, **how)
    assert RunFolder(run.path).settings()[0].image_size == 12
    assert load(run.path).digest == load(RunFolder(run.path).start).digest
    average = run.summary["average"]
    assert average["share"] == 0
    assert len(average["values"]) == 5
    assert f"average {average['text']}" in log.texts
    health = f"health of the last step, which is not kept: {run.summary['verdict']}"
    assert health in log.texts
    assert run.summary["image_size"] == load(source).image_size == 16
    (compared,) = run.summary["differences"]["start"]
    assert compared["first"] == compared["second"]
    page = run.folder.report.read_text()
    assert "The start as it was" in page
    assert "The embedding of the last step, not kept, is" in page
    stored = json.loads(RunFolder(run.path).summary.read_text())
    assert stored["average"] == average


def test_a_run_that_is_replaced_starts_from_the_encoder_that_is_named(tmp_path):
    """Not from its own copy of the one before, which a resumed one has."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 12, 12, 3), np.uint8)
    for seed in (0, 1):
        source = write_network(tmp_path / f"{seed}.safetensors", seed=seed)
        how = dict(encoder=source, batch_size=16, epochs=1, output=tmp_path / "run")
        run = nearkin.train(pixels, overwrite=seed == 1, **how)
        assert load(run.folder.start).digest == load(source).digest


def test_where_none_is_held_out_every_number_is_said_to_be_of_training_images(tmp_path, log):
    source = write_network(tmp_path / "start.safetensors")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 12, 12, 3), np.uint8)
    labels = np.arange(40) % 2
    np.savez(tmp_path / "data.npz", x=pixels, y=labels)
    how = dict(encoder=source, batch_size=16, epochs=1, val=0.0, verbose=log)
    run = nearkin.train(tmp_path / "data.npz", output=tmp_path / "run", report=True, **how)
    assert run.summary["sizes"] == {"train": 40}
    assert run.summary["average"]["text"].endswith("40 training images)")
    scored = {each["protocol"]["of"] for each in run.summary["metrics"]["encoder"].values()}
    assert scored == {"of 40 training images"}
    page = run.folder.report.read_text()
    assert "On training images (none is held out)" in page
    # What is true of any images: what needs labels is not measured, and what was chosen by none.
    others = re.compile("(?<!labeled )(?<!labels of )(?:held-out|test) images")
    assert not others.findall("\n".join([page, *log.texts]))
