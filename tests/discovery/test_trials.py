"""Known classes that are held out for a while, to choose a weight by searching for them."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nearkin.classifier.features import CachedFeatures
from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.data.rng import permutation
from nearkin.discovery.features import FrozenEncoder
from nearkin.discovery.outcome import calibrate
from nearkin.discovery.stages import Stage, Stages
from nearkin.discovery.task import DiscoveryTask
from nearkin.discovery.trials import (
    FOLDS,
    RATES,
    Candidate,
    Trial,
    Trials,
    accuracies,
    balanced_accuracy,
    best,
    candidates,
    folds,
)
from nearkin.errors import UsageError
from nearkin.files import PARTIAL
from nearkin.run.options import method_options, within
from nearkin.types import UNLABELED

CPU = torch.device("cpu")
KNOWN, EACH, OTHERS = 5, 8, 30
LEARNED = EACH - 1  # Of each known class in a trial; a fifth of them is for its score
TRIED = {
    "ncd": (Candidate("ncl", 0.25), Candidate("ncl", 0.75)),
    "gcd": (Candidate("simgcd"),),
}
MODES = ("ncd", "gcd")


def images(seed=0):
    """Features of five known classes and of other images, and the task of finding two more.

    One image of each known class is held out, and has features that would spoil anything.
    """
    rng = np.random.default_rng(seed)
    truth = np.concatenate([np.repeat(np.arange(KNOWN), EACH + 1), KNOWN + np.arange(OTHERS) % 2])
    truth = truth[rng.permutation(len(truth))]
    centers = 4 * rng.normal(size=(KNOWN + 2, 10))
    center = torch.from_numpy(centers[truth] + rng.normal(size=(len(truth), 10))).float()
    noise = torch.from_numpy(rng.normal(size=(2, *center.shape))).float()
    label = np.where(truth < KNOWN, truth, UNLABELED)
    held_out = [np.flatnonzero(label == number)[0] for number in range(KNOWN)]
    center[held_out] = torch.nan
    rows = np.setdiff1d(np.arange(len(label)), held_out)
    return CachedFeatures(center, center + 0.3 * noise), DiscoveryTask(label, rows, KNOWN, 2)


BASE = TrainConfig(
    method="ncl", backbone="tiny", image_size=8, batch_size=16, epochs=4, seed=0,
    precision="fp32", workers=0,
)  # fmt: skip


def trials(folder, mode, cached, task, options=None, groups=None, **base):
    encoder, settings = FrozenEncoder(cached, CPU), replace(BASE, **base)
    stages = Stages(encoder, replace(task, mode=mode), settings)
    groups = np.arange(len(task.label)) if groups is None else groups
    return Trials(stages, groups, folder, options or {}, train=Stage.try_out)


def first_trial(folder, mode, *given, **base):
    running = trials(folder, mode, *given, **base).run(TRIED[mode][:1])
    first = next(running)
    running.close()
    return first


@pytest.fixture(scope="module", params=MODES)
def whole(request, tmp_path_factory):
    """All trials of a mode in one go: the mode, the folder and the trials."""
    folder = tmp_path_factory.mktemp(request.param)
    cached, task = images()
    results = list(trials(folder, request.param, cached, task).run(TRIED[request.param]))
    return request.param, folder, results


def same(one, other):
    """Whether two lists of trials were by the same networks: what they answered, to the bit."""
    return [t.candidate for t in one] == [t.candidate for t in other] and all(
        np.array_equal(a.probability, b.probability) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("num_images", "size"), [(6000, 3000), (100, 2000)])
def test_a_queue_for_the_whole_task_is_reduced_to_what_a_trial_holds(num_images, size, tmp_path):
    """Trials have fewer images: at most half of them, or as many as the paper has."""
    asked = {"queue_size": 5000, "temperature": 0.1}
    reduced = within("ncl", asked, num_images)
    assert reduced == asked | {"queue_size": size}
    assert method_options("ncl", reduced, num_images, 8)["queue_size"] == size
    with pytest.raises(UsageError, match="more than half"):
        method_options("ncl", asked, num_images, 8)
    assert first_trial(tmp_path, "ncd", *images(), options=asked).candidate == TRIED["ncd"][0]


@given(st.integers(2, 60), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_every_fold_hides_other_classes_and_leaves_two_or_more(num_known, num_novel, seed):
    splits = folds(num_known, num_novel, seed)
    if num_known < 4:
        assert splits == []
        return
    assert len(splits) == FOLDS == 3
    assert len({tuple(fold.tolist()) for fold in splits}) == FOLDS
    (hidden,) = {len(fold) for fold in splits}
    assert 2 <= hidden <= num_known - 2
    for fold in splits:
        assert len(set(fold.tolist())) == hidden
        assert set(fold.tolist()) <= set(range(num_known))


def test_hidden_classes_are_to_the_others_as_novel_ones_to_known_ones():
    """But for two at the least, and three fifths at the most."""
    shares = (5, 5, 3), (136, 106, 60), (69, 30, 21), (8, 1, 2), (4, 4, 2), (10, 90, 6)
    for known, novel, hidden in shares:
        assert {len(fold) for fold in folds(known, novel, seed=0)} == {hidden}, known
    drawn = {tuple(folds(10, 4, seed)[0].tolist()) for seed in range(20)}
    assert len(drawn) > 5


@given(st.integers(6, 60), st.integers(0, 1000))
def test_no_class_is_hidden_twice_where_there_are_enough(num_known, seed):
    hidden = [number for fold in folds(num_known, 2, seed) for number in fold.tolist()]
    assert len(set(hidden)) == len(hidden) or len(hidden) > num_known


def test_trials_find_hidden_classes_among_far_blobs(whole):
    mode, _, results = whole
    assert [trial.candidate for trial in results] == [*TRIED[mode]] * FOLDS
    for trial in results:
        assert 0 <= trial.accuracy <= 1
        np.testing.assert_allclose(trial.probability.sum(axis=1), 1)
        assert trial.probability.shape == (len(trial.correct), KNOWN)
    # Guessing one of two novel classes of equal size, or one of five.
    chance = {"ncd": 0.5, "gcd": 0.3}[mode]
    assert np.mean([trial.correct.mean() for trial in results]) > chance + 0.15
    assert np.mean([trial.accuracy for trial in results]) > 0.2 + 0.15  # all classes possible
    # A trial asks for hidden classes, and in mode gcd for half of the others.
    counts = {len(trial.correct) for trial in results}
    if mode == "ncd":
        assert counts == {2 * LEARNED}
        assert all((trial.probability[:, : KNOWN - 2] == 0).all() for trial in results)
        return
    others, hidden = (KNOWN - 2) * LEARNED, 2 * LEARNED
    assert all(hidden + 0.2 * others < count < hidden + 0.8 * others for count in counts)
    assert all((trial.probability > 0).all() for trial in results)


def test_what_is_hidden_and_what_nobody_knows_changes_not_a_bit_of_what_is_learned(
    whole, tmp_path
):
    """Which hidden image is of which hidden class is looked at only to count what is right.

    Images without a known class have no part in a trial at all, nor have those held out.
    """
    mode, _, results = whole
    cached, task = images()
    hides = np.isin(task.label, folds(KNOWN, task.num_novel, 0)[0])
    hidden = np.intersect1d(task.rows, np.flatnonzero(hides))
    label = task.label.copy()
    label[hidden] = np.random.default_rng(1).permutation(label[hidden])
    assert (label != task.label).any()
    nobody = np.flatnonzero(label == UNLABELED)
    cached.center[nobody], cached.views[:, nobody] = torch.nan, torch.nan
    other = replace(task, label=label, rows=np.setdiff1d(task.rows, nobody[:3]))
    first = first_trial(tmp_path, mode, cached, other)
    assert np.array_equal(first.probability, results[0].probability)
    assert not np.array_equal(first.correct, results[0].correct)


def test_a_stopped_run_repeats_no_finished_trial(whole, tmp_path):
    """As it is after a stop within the last trial, whose file is not whole."""
    mode, folder, results = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    last = tmp_path / f"{mode}-{FOLDS - 1}-{TRIED[mode][-1]}.npz"
    half = tmp_path / f".{last.name}{PARTIAL}7"
    half.write_bytes(last.read_bytes()[:100])
    last.unlink()
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.glob(f"{mode}-*.npz")}
    assert len(finished) == len(results) - 1
    cached, task = images()
    again = list(trials(tmp_path, mode, cached, task).run(TRIED[mode]))
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert same(again, results)
    half.unlink()  # as the run does, when it is opened
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in folder.iterdir()}
    # Finished trials need no images: nothing is trained again.
    gone = CachedFeatures(cached.center * torch.nan, cached.views * torch.nan)
    assert same(list(trials(folder, mode, gone, task).run(TRIED[mode])), results)


@pytest.mark.parametrize(("mode", "count"), [("ncd", 3), ("gcd", 2)])
def test_classes_of_one_image_are_tried(mode, count, tmp_path):
    """But in mode gcd for a fold whose labels are all hidden."""
    cached, task = images()
    keep = [np.flatnonzero(task.label == number)[1] for number in range(KNOWN)]
    rest = np.flatnonzero(task.label == UNLABELED)
    task = replace(task, rows=np.sort(np.concatenate([keep, rest])))
    results = list(trials(tmp_path, mode, cached, task).run(TRIED[mode][:1]))
    assert len(results) == count
    assert all(np.isfinite(trial.probability).all() for trial in results)
    assert all(0 <= trial.accuracy <= 1 for trial in results)


def test_folds_that_leave_no_labels_are_passed_over(tmp_path):
    """A search in one fold takes the first that leaves some, or none would calibrate a network."""
    cached, task = images()
    odd = permutation(BASE.seed, 1, len(task.label)) % 2 == 1  # as mode gcd hides labels
    first, second, _ = folds(4, task.num_novel, BASE.seed)
    lost = np.setdiff1d(second, first)[0]  # is known in the first fold alone
    label = np.full_like(task.label, UNLABELED)
    for number in range(4):
        parity = odd if number != lost else ~odd
        label[np.flatnonzero((task.label == number) & parity)[1]] = number
    few = replace(task, label=label, num_known=4)
    assert len(list(trials(tmp_path, "gcd", cached, few).run(TRIED["gcd"], num_folds=1))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["gcd-1-simgcd.npz"]


def test_images_of_one_group_are_learned_from_or_all_scored(tmp_path):
    cached, task = images()
    groups = np.arange(len(task.label))
    for number in range(KNOWN):
        own = task.labeled[task.label[task.labeled] == number]
        groups[own] = own[np.arange(EACH) // 2 * 2]
    for trial in trials(tmp_path, "ncd", cached, task, groups=groups).run(TRIED["ncd"][:1]):
        assert len(trial.rows) == 2 * (EACH - 2)
        assert (np.unique(groups[trial.rows], return_counts=True)[1] == 2).all()


def trial(candidate, accuracy):
    return Trial(candidate, accuracy, np.ones((1, 1)), np.ones(1, bool), np.zeros(1, int))


USUAL, LOW, HIGH = (Candidate("ncl", value) for value in RATES)


def test_an_image_of_several_trials_counts_once_among_those_that_calibrated():
    probability, correct = np.full((4, 2), [0.8, 0.2]), np.array([True, True, True, False])
    rows = np.arange(4), np.arange(2, 6)
    some = [Trial(USUAL, 0.75, probability, correct, own) for own in rows]
    assert calibrate(some, np.arange(6)).num_images == 6


def test_images_of_one_group_are_one_witness_for_a_temperature():
    correct = np.arange(60) % 2 == 0  # half of what is said with certainty is wrong
    said = np.tile([0.99, 0.01], (60, 1))
    some = [Trial(USUAL, 0.5, said, correct, np.arange(60))]
    assert calibrate(some, np.arange(60)).temperature > 2
    assert calibrate(some, np.zeros(60, int)).temperature == 1


def test_what_is_given_is_not_searched_for():
    config = DiscoverConfig(known=["a", "b"], mode="ncd", options={"temperature": 0.2})
    assert [each.rate for each in candidates(config)] == [0.5, 0.25, 0.75], "the usual one first"
    assert candidates(replace(config, options={"positive_rate": 0.3})) == [Candidate("ncl")]
    for pairs, number in (("ranks", 1), ("close", 1), ("closest", 3)):
        assert len(candidates(replace(config, options={"pseudo_labels": pairs}))) == number, pairs
    assert "positive_rate" not in Candidate("ncl").options(5)
    assert candidates(DiscoverConfig(known=["a", "b"])) == [Candidate("simgcd")]


def test_the_first_value_is_taken_unless_another_is_better_by_a_standard_error():
    truth, predicted = np.array([0] * 8 + [1] * 2), np.array([0] * 8 + [1, 0])
    assert balanced_accuracy(truth, predicted, num_known=1) == pytest.approx((1 + 0.5) / 2)

    def chosen(**accuracies):
        every = {"usual": USUAL, "low": LOW, "high": HIGH}
        return best([
            trial(every[name], accuracy)
            for name, by_fold in accuracies.items() for accuracy in by_fold
        ])  # fmt: skip

    # Ahead by .1, .1 and .1: clearly. By .3, 0 and 0: the mean is .1, and its standard error too.
    assert chosen(usual=[0.5, 0.6, 0.7], low=[0.6, 0.7, 0.8]) == LOW
    assert chosen(usual=[0.5, 0.6, 0.7], low=[0.8 - 1e-9, 0.6, 0.7]) == USUAL
    assert chosen(usual=[0.5, 0.6, 0.7], low=[0.8, 0.61, 0.71]) == LOW
    assert chosen(usual=[0.7, 0.7], low=[0.7, 0.7]) == USUAL
    # Of those that are not clearly worse than the best, the first counts, not the second best.
    assert chosen(usual=[0.1, 0.1], low=[0.78, 0.72], high=[0.72, 0.8]) == LOW
    assert chosen(usual=[0.7], low=[0.71]) == LOW, "one fold has no error"
    results = [trial(LOW, 0.9), trial(LOW, 0.1)]
    assert accuracies(results) == {LOW: [0.9, 0.1]}


@given(st.floats(0, 10), st.integers(1, 100))
def test_a_positive_rate_is_a_part_of_the_pairs_of_even_classes_and_never_more_than_all(value, k):
    assert Candidate("ncl", value).options(k) == {"positive_rate": min(1, value / k)}
    assert Candidate("simgcd").options(k) == {}
