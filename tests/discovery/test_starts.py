"""Heads that start at clusters: no class begins without images, and the clusters are k-means'."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nearkin.classifier.features import CachedFeatures
from nearkin.config import TrainConfig
from nearkin.discovery.features import FrozenEncoder
from nearkin.discovery.outcome import head_clustering, kmeans_clustering
from nearkin.discovery.stages import Stages
from nearkin.discovery.task import DiscoveryTask
from nearkin.metrics.clusters import match, right
from nearkin.types import UNLABELED

KNOWN, NOVEL, EACH, HELD_OUT = 6, 20, 5, 7
MODES = ("ncd", "gcd")
"""With NCL and with SimGCD in the last stage."""
BASE = TrainConfig(
    method="ncl", backbone="tiny", image_size=8, batch_size=32, epochs=20, seed=0,
    precision="fp32", workers=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def init():
    """Many classes of few images, and what the last stage of each method starts from."""
    rng = np.random.default_rng(0)
    truth = rng.permutation(np.repeat(np.arange(KNOWN + NOVEL), EACH))
    centers = 3 * rng.normal(size=(KNOWN + NOVEL, 16))
    center = torch.from_numpy(centers[truth] + rng.normal(size=(len(truth), 16))).float()
    views = center + 0.3 * torch.from_numpy(rng.normal(size=(2, *center.shape))).float()
    center[:HELD_OUT] = torch.nan  # nobody may look at what is held out
    label = np.where(truth < KNOWN, truth, UNLABELED)
    task = DiscoveryTask(label, np.arange(HELD_OUT, len(truth)), KNOWN, NOVEL)
    encoder = FrozenEncoder(CachedFeatures(center, views), torch.device("cpu"))
    tasks = {mode: replace(task, mode=mode) for mode in MODES}
    return encoder, tasks, truth, {mode: at_clusters(encoder, tasks[mode]) for mode in MODES}


def at_clusters(encoder, task):
    return Stages(encoder, task, BASE).start(lambda stage: stage.try_out())


def test_clusters_are_of_the_images_to_learn_from_and_of_the_unlabeled_ones_among_them(init):
    _, tasks, truth, starts = init
    task, start = tasks["ncd"], starts["ncd"]
    label = task.label[task.rows]
    novel, joint = start.cluster.numpy() - KNOWN, starts["gcd"].cluster.numpy()
    assert start.features.isfinite().all()
    assert ((novel < 0) == (label != UNLABELED)).all()
    assert set(novel[label == UNLABELED]) == set(range(NOVEL))
    assert (joint[label != UNLABELED] == label[label != UNLABELED]).all()
    rest = truth[task.rows][label == UNLABELED]
    found = novel[label == UNLABELED]
    assert right(rest, found, match(rest, found)).mean() > 0.7


@pytest.mark.parametrize("mode", MODES)
def test_a_head_starts_with_the_images_of_its_cluster(init, mode):
    encoder, tasks, truth, starts = init
    task, start = tasks[mode], starts[mode]
    order = torch.randperm(len(start.cluster), generator=torch.Generator().manual_seed(0))
    mixed = start._replace(features=start.features[order])
    accuracy = {}
    for name, at in (("clusters", start), ("others", mixed)):
        stage = Stages(encoder, task, BASE).classes(at, {})
        rest = task.label[task.rows] == UNLABELED
        classes = head_clustering(encoder, stage.method, task).of(task)[task.rows][rest]
        labels = truth[task.rows][rest]
        accuracy[name] = right(labels, classes, match(labels, classes)).mean()
        if at is start:
            cluster = start.cluster.numpy()[rest]
            assert (classes == cluster).mean() > 0.8
    assert accuracy["clusters"] > accuracy["others"] + 0.2


def test_a_start_depends_on_its_seed_and_no_other_and_may_have_few_images(init):
    encoder, tasks, _, starts = init
    for mode, task in tasks.items():
        few = replace(task, rows=np.concatenate([task.labeled, task.unlabeled[:8]]))
        torch.manual_seed(5)
        assert torch.equal(at_clusters(encoder, task).cluster, starts[mode].cluster)
        stage = Stages(encoder, few, BASE).classes(at_clusters(encoder, few), {})
        assert all(parameter.isfinite().all() for parameter in stage.method.parameters())


def test_k_means_of_mixed_images_has_one_set_of_novel_centers(init):
    """Where known classes are ruled out, an image is of the nearest novel center of all centers."""
    encoder, tasks, _, _ = init
    task = tasks["gcd"]
    features = encoder.cached.center[torch.from_numpy(task.rows)]
    learned = replace(task, label=task.label[task.rows], rows=np.arange(len(task.rows)))
    mixed = kmeans_clustering(features, learned, 0)
    novel = mixed.joint >= KNOWN
    assert novel.any()
    assert (mixed.novel[novel] == mixed.joint[novel]).all()
    assert (mixed.novel >= KNOWN).all()
    apart = kmeans_clustering(features, replace(learned, mode="ncd"), 0)
    assert (apart.joint == mixed.joint).all()
    assert (apart.novel >= KNOWN).all()
    assert (apart.novel[novel] != apart.joint[novel]).any()


def test_k_means_leaves_classes_out_that_no_image_without_a_label_has(init):
    """As the classifier of such a round does: their images are not there, nor are their clusters."""
    encoder, tasks, _, _ = init
    task = tasks["gcd"]
    features = encoder.cached.center[torch.from_numpy(task.rows)]
    task = replace(task, label=task.label[task.rows], rows=np.arange(len(task.rows)))
    excluded = np.zeros((len(features), task.num_classes), bool)
    excluded[task.label == UNLABELED, 1] = True
    clustering = kmeans_clustering(features, task, 0, excluded)
    assert {*clustering.joint.tolist()} == {*range(task.num_classes)} - {1}
    rows = task.rows[task.label[task.rows] != 1]
    label = np.where(task.label > 1, task.label - 1, task.label)
    fewer = replace(task, label=label, rows=rows, num_known=KNOWN - 1)
    alone = kmeans_clustering(features, fewer, 0)
    assert (clustering.joint - (clustering.joint > 1) == alone.joint).all()
    assert (clustering.novel - 1 == alone.novel).all()
