"""Heads that start at clusters: no class begins without images, and the clusters are k-means'."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nearkin.classifier.classifier import apply_layer, class_probability, frozen_copy, heads_of
from nearkin.classifier.features import CachedFeatures
from nearkin.config import TrainConfig
from nearkin.discovery.clusterings import kmeans_clustering, start_clusters
from nearkin.discovery.features import FrozenEncoder
from nearkin.discovery.stages import class_stage, stage_init
from nearkin.discovery.task import DiscoveryTask
from nearkin.metrics.clusters import cluster_accuracy
from nearkin.types import UNLABELED

KNOWN, NOVEL, EACH, HELD_OUT = 6, 20, 5, 7
METHODS = ("ncl", "simgcd")
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
    return encoder, task, truth, {method: at_clusters(encoder, task, method) for method in METHODS}


def at_clusters(encoder, task, method):
    return stage_init(encoder, task, BASE, method, lambda stage: stage.try_out())


def classes_of(encoder, task, method, disjoint):
    rows = torch.from_numpy(task.rows)
    with torch.inference_mode():
        features = apply_layer(frozen_copy(method.backbone), encoder.cached.center[rows])
        impossible = task.only_novel if disjoint else None
        probability = class_probability(frozen_copy(heads_of(method)), features, impossible)
    return probability.argmax(dim=1).numpy()


def test_clusters_are_of_the_images_to_learn_from_and_of_the_unlabeled_ones_among_them(init):
    _, task, truth, starts = init
    start = starts["ncl"].heads
    label = task.label[task.rows]
    novel, joint = start.cluster.numpy() - KNOWN, starts["simgcd"].heads.cluster.numpy()
    assert start.features.isfinite().all()
    assert ((novel < 0) == (label != UNLABELED)).all()
    assert set(novel[label == UNLABELED]) == set(range(NOVEL))
    assert (joint[label != UNLABELED] == label[label != UNLABELED]).all()
    rest = truth[task.rows][label == UNLABELED]
    assert cluster_accuracy(rest, novel[label == UNLABELED])[0] > 0.7


@pytest.mark.parametrize("method", METHODS)
def test_a_head_starts_with_the_images_of_its_cluster(init, method):
    encoder, task, truth, starts = init
    start, disjoint = starts[method].heads, method == "ncl"
    order = torch.randperm(len(start.cluster), generator=torch.Generator().manual_seed(0))
    mixed = replace(start, features=start.features[order])
    accuracy = {}
    for name, at in (("clusters", start), ("others", mixed)):
        stage = class_stage(encoder, task, BASE, starts[method]._replace(heads=at), method, {})
        rest = task.label[task.rows] == UNLABELED
        classes = classes_of(encoder, task, stage.method, disjoint)[rest]
        accuracy[name] = cluster_accuracy(truth[task.rows][rest], classes)[0]
        if at is start:
            cluster = start.cluster.numpy()[rest]
            assert (classes == cluster).mean() > 0.8
    assert accuracy["clusters"] > accuracy["others"] + 0.2


def test_a_start_depends_on_its_seed_and_no_other_and_may_have_few_images(init):
    encoder, task, _, starts = init
    few = replace(task, rows=np.concatenate([task.labeled, task.unlabeled[:8]]))
    for method in METHODS:
        torch.manual_seed(5)
        again = at_clusters(encoder, task, method).heads
        assert torch.equal(again.cluster, starts[method].heads.cluster)
        start = at_clusters(encoder, few, method)
        stage = class_stage(encoder, few, BASE, start, method, {})
        assert all(parameter.isfinite().all() for parameter in stage.method.parameters())


def test_k_means_of_mixed_images_has_one_set_of_novel_centers(init):
    """Where known classes are ruled out, an image is of the nearest novel center of all centers."""
    encoder, task, _, _ = init
    features = encoder.cached.center[torch.from_numpy(task.rows)]
    learned = replace(task, label=task.label[task.rows], rows=np.arange(len(task.rows)))
    mixed = kmeans_clustering(features, learned, 0, disjoint=False)
    novel = mixed.joint >= KNOWN
    assert novel.any()
    assert (mixed.novel[novel] == mixed.joint[novel]).all()
    assert (mixed.novel >= KNOWN).all()
    apart = kmeans_clustering(features, learned, 0, disjoint=True)
    assert (apart.joint == mixed.joint).all()
    assert (apart.novel >= KNOWN).all()
    assert (apart.novel[novel] != apart.joint[novel]).any()


def test_classes_that_no_unlabeled_image_has_take_no_part_and_a_round_starts_where_one_ended(init):
    _, task, truth, starts = init
    features = starts["simgcd"].heads.features
    label, rows = task.label[task.rows], task.rows
    for excluded in (0, 3, KNOWN):
        some = replace(task, num_excluded=excluded)
        cluster = start_clusters(features, some, 0)
        assert (cluster[label != UNLABELED] == label[label != UNLABELED]).all()
        assert cluster[label == UNLABELED].min() >= excluded
    # From the truth, with novel classes in another order: that order stays.
    renamed = np.where(truth < KNOWN, truth, KNOWN + (truth - KNOWN + 1) % NOVEL)
    begun = replace(task, start=np.where(truth < KNOWN, UNLABELED, renamed))
    cluster = start_clusters(features, begun, 0)
    assert (cluster == renamed[rows]).mean() > 0.9
