"""Cached views, frozen and finetuned encoders, and the two stages on top of them."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from nearkin.classifier.features import UNTOUCHED, CachedFeatures, Extraction, ViewSettings
from nearkin.classifier.layers import trainable_copy
from nearkin.config import TrainConfig
from nearkin.data.opening import open_images
from nearkin.data.samplers import RandomBatchSampler, TwoStreamBatchSampler
from nearkin.discovery import stages as module
from nearkin.discovery.features import NUM_VIEWS, CachedViews, FinetunedEncoder, FrozenEncoder
from nearkin.discovery.stages import Stages
from nearkin.discovery.task import DiscoveryTask
from nearkin.encoders.encoder import Encoder
from nearkin.errors import UsageError
from nearkin.methods import METHODS
from nearkin.networks.backbone import build_backbone
from nearkin.networks.branch import Backbone
from nearkin.run.auto import resolve
from nearkin.types import UNLABELED

CPU = torch.device("cpu")
CACHED, IMAGES, DIM = 4, 30, 5
MODES = ("ncd", "gcd")
"""With NCL and with SimGCD in the last stage."""


def marked():
    """Features that say of which view and which image they are."""
    view, image = torch.meshgrid(torch.arange(CACHED), torch.arange(IMAGES), indexing="ij")
    rest = torch.zeros(CACHED, IMAGES, DIM - 2)
    return torch.cat([torch.stack([view, image], dim=2).float(), rest], dim=2)


def cached_views(num_views=2, sampler=None, labels=None):
    labels = np.arange(IMAGES) % 3 if labels is None else labels
    sampler = sampler or RandomBatchSampler(IMAGES, 10, seed=3)
    return CachedViews(marked(), sampler, num_views, torch.from_numpy(labels))


def test_a_step_draws_different_cached_views_of_the_same_images():
    for num_views in (1, 2, CACHED):
        feed = cached_views(num_views)
        for step, batch in enumerate(feed.load(0, 9)):
            rows = feed.sampler.rows(step)
            assert batch.index.tolist() == rows.tolist()
            assert batch.label.tolist() == (rows % 3).tolist()
            assert len(batch.views) == num_views
            for view in batch.views:
                assert view.shape == (10, DIM, 1, 1)
                assert view[:, 1].flatten().tolist() == rows.tolist()
            chosen = torch.cat(batch.views, dim=2)[:, 0, :, 0]
            assert all(len(set(row)) == num_views for row in chosen.tolist())


def test_every_cached_view_of_every_image_comes_first_in_some_epoch_and_all_evenly():
    first = torch.cat([batch.views[0][:, :2, 0, 0] for batch in cached_views().load(0, 300)])
    assert len(first[:1200].unique(dim=0)) == CACHED * IMAGES
    shares = torch.bincount(first[:, 0].long(), minlength=CACHED) / len(first)
    np.testing.assert_allclose(shares, 1 / CACHED, atol=0.03)  # 3,000 draws: four deviations


def test_any_start_gives_the_same_batches():
    feed = cached_views()
    whole = list(feed.load(0, 9))
    for start, again in ((0, cached_views()), (1, feed), (4, cached_views()), (7, feed)):
        for expected, result in zip(whole[start:], again.load(start, 9), strict=True):
            assert torch.equal(torch.stack(expected.views), torch.stack(result.views))
            assert torch.equal(expected.index, result.index)
            assert torch.equal(expected.label, result.label)


def test_the_views_of_a_image_do_not_depend_on_its_company():
    """Nor on the batch size: only on the seed, the epoch and the image."""

    def chosen(batch_size, seed=3):
        feed = cached_views(sampler=RandomBatchSampler(IMAGES, batch_size, seed))
        per_epoch = feed.sampler.steps_per_epoch
        return {
            (step // per_epoch, int(image)): [view[row, 0].item() for view in batch.views]
            for step, batch in enumerate(feed.load(0, 2 * per_epoch))
            for row, image in enumerate(batch.index)
        }

    assert chosen(10) == chosen(6)
    assert chosen(10) != chosen(10, seed=4)
    first, second = ([chosen(10)[epoch, image] for image in range(IMAGES)] for epoch in (0, 1))
    assert first != second


def test_images_without_a_label_have_none_in_a_batch_either():
    labels = np.where(np.arange(IMAGES) < 6, np.arange(IMAGES) % 2, UNLABELED)
    order = TwoStreamBatchSampler(np.arange(6), labels[:6], np.arange(6, IMAGES), 8, seed=1)
    for batch in cached_views(sampler=order, labels=labels).load(0, 6):
        assert batch.label[batch.index >= 6].eq(UNLABELED).all()
        assert batch.label[batch.index < 6].tolist() == (batch.index[batch.index < 6] % 2).tolist()
        assert (batch.index < 6).sum() == 4


def blobs(sizes, dim=12, views=3, seed=0):
    """Features around one center per class, and the class of each."""
    rng = np.random.default_rng(seed)
    truth = np.repeat(np.arange(len(sizes)), sizes)
    centers = rng.normal(size=(len(sizes), dim)) * 3
    center = torch.from_numpy(centers[truth] + rng.normal(size=(len(truth), dim))).float()
    noise = torch.from_numpy(rng.normal(size=(views, *center.shape))).float()
    return CachedFeatures(center, center + 0.3 * noise), truth


def base(**settings):
    fixed = dict(method="ncl", workers=0, backbone="tiny", precision="fp32", augment="characters")
    return TrainConfig(**fixed | dict(image_size=16, batch_size=16, epochs=2, seed=0) | settings)


def frozen(labeled, unlabeled, num_novel=2, mode="ncd"):
    """A encoder and a task of so many images of two known and of two novel classes."""
    sizes = [labeled - labeled // 2, labeled // 2, unlabeled - unlabeled // 2, unlabeled // 2]
    cached, truth = blobs(sizes)
    label = np.where(truth < 2, truth, UNLABELED)
    task = DiscoveryTask(label, np.arange(len(label)), 2, num_novel, mode)
    return FrozenEncoder(cached, CPU), task


def state(method):
    return {name: tensor.clone() for name, tensor in method.state_dict().items()}


def changed(before, after):
    """The names of tensors that have moved."""
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def finite(method):
    return all(t.isfinite().all() for t in method.state_dict().values() if t.is_floating_point())


def started(encoder, task, options=None, **settings):
    """The stage of the known classes after its training, if there is one, and the last before."""
    first = []

    def train(stage):
        stage.try_out()
        first.append(stage)

    stages = Stages(encoder, task, base(**settings))
    last = stages.classes(stages.start(train), options or {})
    return *first, last


def trained(labeled, unlabeled, mode="ncd", num_novel=2, options=None, **settings):
    """All stages, one after the other."""
    stages = started(*frozen(labeled, unlabeled, num_novel, mode), options, **settings)
    stages[-1].try_out()
    return stages


def test_a_task_knows_its_labeled_and_its_unlabeled_images_and_no_stage_sees_those_held_out():
    label = np.array([0, UNLABELED, 1, UNLABELED, 0])
    task = DiscoveryTask(label, np.array([1, 2, 3, 4]), 2, 1)  # image 0 is held out
    assert (task.labeled.tolist(), task.unlabeled.tolist()) == ([2, 4], [1, 3])
    encoder, task = frozen(20, 30, mode="gcd")
    held_out = np.arange(0, 50, 5)
    task = replace(task, rows=np.setdiff1d(task.rows, held_out))
    assert not seen(*started(encoder, task)) & set(held_out.tolist())


def seen(*stages, steps=12):
    """The images in the first batches of these stages."""
    batches = [batch for stage in stages for batch in stage.feed.load(0, steps)]
    return set(torch.cat([batch.index for batch in batches]).tolist())


def test_the_first_stage_sees_labeled_images_only_and_the_second_half_of_each_batch():
    encoder, task = frozen(20, 30)
    known, stage = started(encoder, task)
    assert seen(known) == set(task.labeled.tolist())
    assert known.config.method == "supervised"
    for batch in stage.feed.load(0, 6):
        assert (batch.label != UNLABELED).sum() == 8
        assert len(batch.label) == 16
    assert seen(stage, steps=30) == set(range(50))


@pytest.mark.parametrize("mode", MODES)
def test_the_last_stage_goes_on_from_the_known_classes(mode):
    """NCL with their head, too, as in the authors' ncl_cifar.py; SimGCD on narrow features."""
    encoder, task = frozen(20, 30, mode=mode)
    cached = copy.deepcopy(encoder.cached)
    known, stage = started(encoder, task)
    assert known.config.method == "supervised"
    before = state(known.method)
    parts = [(known.method.backbone.state_dict(), stage.method.backbone)]
    if mode == "ncd":
        parts.append((known.method.known.state_dict(), stage.method.heads.known))
    assert not any(changed(learned, part.state_dict()) for learned, part in parts)
    stage.try_out()
    assert all(changed(learned, part.state_dict()) for learned, part in parts)
    assert not changed(before, known.method.state_dict()), "the first stage's network has moved"
    assert torch.equal(cached.center, encoder.cached.center)
    assert torch.equal(cached.views, encoder.cached.views)


def test_simgcd_starts_at_the_components_of_features_that_are_wider_than_the_layer():
    """Up to one factor, distances are those of the features; their mean square is one."""
    cached, truth = blobs([150, 150, 150], 300)
    cached.center[:, 3] += 70  # a mean that says nothing
    rows = np.arange(50, 450)
    cached.center[:50] = torch.nan  # held out
    label = np.where(truth < 2, truth, UNLABELED)
    (stage,) = started(FrozenEncoder(cached, CPU), DiscoveryTask(label, rows, 2, 1))
    layer = stage.method.backbone.eval()
    with torch.no_grad():
        found = layer(cached.center[50:, :, None, None]).double()
    center = cached.center[50:].double()
    assert found.shape == (400, 256)
    assert found.mean(dim=0).abs().max() < 1e-4
    assert found.var(dim=0, correction=0).mean().item() == pytest.approx(1, rel=1e-3)
    ratio = torch.pdist(found) / torch.pdist(center)
    assert ratio.std() / ratio.mean() < 0.1  # 256 of 300 components are kept
    before = state(stage.method.backbone)
    stage.try_out()
    assert changed(before, state(stage.method.backbone))


def test_the_known_classes_are_learned():
    encoder, task = frozen(40, 20)
    known = Stages(encoder, task, base(epochs=30)).known()
    known.try_out()
    method = known.method.eval()
    with torch.inference_mode():
        logits = method.known(method.backbone(encoder.cached.center[task.labeled, :, None, None]))
    predicted = logits.argmax(dim=1).numpy()
    assert (predicted == task.label[task.labeled]).mean() > 0.95  # two far blobs


def test_a_stage_is_a_function_of_its_seed_and_leaves_the_random_numbers_of_the_caller_alone():
    def weights(seed):
        before = torch.random.get_rng_state()
        learned = state(trained(20, 30, seed=seed)[1].method)
        assert torch.equal(before, torch.random.get_rng_state())
        return learned

    torch.manual_seed(1)
    once = weights(5)
    torch.manual_seed(2)
    assert not changed(once, weights(5))
    assert changed(once, weights(6))


def test_the_queue_is_at_most_half_of_the_unlabeled_images_or_refused():
    with pytest.raises(UsageError, match="queue_size 2001 is more than half of the 30 images"):
        trained(20, 30, options={"queue_size": 2001})  # the paper's is 2000
    for unlabeled in (5, 12, 30):
        _, stage = trained(20, unlabeled)
        sizes = {len(stage.method.novel_queue.keys), len(stage.method.known_queue.keys)}
        assert sizes == {stage.config.options["queue_size"]}
        assert 1 <= stage.config.options["queue_size"] <= unlabeled // 2
        filled = stage.method.novel_queue.index
        assert set(filled[filled != UNLABELED].tolist()) <= set(range(20, 20 + unlabeled))


@pytest.mark.parametrize("mode", MODES)
def test_few_images_are_learned_from(mode):
    for labeled, unlabeled in ((2, 2), (2, 30), (3, 5), (20, 1), (60, 11)):
        *first, stage = trained(labeled, unlabeled, mode)
        assert all(finite(each.method) for each in (*first, stage)), (labeled, unlabeled)
        assert stage.feed.sampler.steps_per_epoch >= 1
        assert stage.feed.sampler.num_labeled <= labeled


def test_a_batch_that_the_images_do_not_fill_shrinks():
    """Half of it stays labeled, if there are so many; an epoch sees nearly every image."""
    for labeled, unlabeled in ((60, 40), (200, 41), (30, 500), (100, 100)):
        for batch_size, mode in itertools.product((16, 128), MODES):
            encoder, task = frozen(labeled, unlabeled, mode=mode)
            stages = Stages(encoder, task, base(batch_size=batch_size))
            order = stages.classes(stages.start(lambda _: None), {}).feed.sampler
            assert order.num_labeled <= order.batch_size / 2
            assert order.batch_size - order.num_labeled <= unlabeled
            if min(labeled, unlabeled) >= batch_size // 2:
                assert order.batch_size == batch_size
            else:
                assert order.batch_size >= 2 * min(labeled, unlabeled)


def test_as_many_classes_as_images_no_pairs_all_pairs_and_equal_features_are_learned_from():
    for mode in MODES:
        assert finite(trained(12, 6, mode, num_novel=6)[-1].method), mode
    for rate in (0.0, 1.0):
        assert finite(trained(8, 12, options={"positive_rate": rate})[1].method), rate
    cached = CachedFeatures(torch.ones(40, 6), torch.ones(3, 40, 6))
    label = np.where(np.arange(40) < 20, np.arange(40) % 2, UNLABELED)
    for mode in MODES:
        task = DiscoveryTask(label, np.arange(40), 2, 2, mode)
        *_, stage = started(FrozenEncoder(cached, CPU), task)
        stage.try_out()
        assert finite(stage.method), mode


def test_automatic_epochs_come_to_a_number_of_steps_of_which_a_share_can_be_tried_out(monkeypatch):
    """600 steps, but between 10 and 200 epochs."""
    monkeypatch.setattr(module, "MAX_EPOCHS", 200)  # see conftest.py
    for labeled, epochs in ((600, 17), (40, 200), (2000, 10)):
        stage = Stages(*frozen(labeled, 20), base(epochs="auto", batch_size=16)).known()
        assert stage.config.epochs == epochs
    stages = Stages(*frozen(20, 30), base(epochs=8))
    init = stages.start(lambda _: None)

    def steps(share):
        stage = stages.classes(init, {})
        stage.try_out(share)
        return int(stage.method.backbone.body[2].num_batches_tracked) // 2  # two views a step

    per_epoch = 30 // 8
    assert steps(1.0) == 8 * per_epoch
    assert steps(0.5) == 4 * per_epoch
    assert steps(0.01) == 1


@pytest.fixture(scope="module")
def finetuned():
    """Finetuned encoders on 40 images of which half are labeled."""
    rng = np.random.default_rng(0)
    images = open_images(rng.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8))
    torch.manual_seed(0)
    pretrained = Encoder(build_backbone("tiny", 8), 8, {})
    cached = Extraction(pretrained, images, UNTOUCHED, CPU, 0).compute().features

    def encoder(layers="all"):
        settings = base(cache="off", image_size=8)
        return FinetunedEncoder(pretrained, cached, images, layers, settings, CPU)

    label = np.where(np.arange(40) < 20, np.arange(40) % 2, UNLABELED)
    return encoder, DiscoveryTask(label, np.arange(40), 2, 2)


def parameters(backbone):
    return {name: p.detach().clone() for name, p in backbone.body.named_parameters()}


@pytest.mark.parametrize("mode", MODES)
def test_only_the_last_blocks_are_trained_and_batch_norms_of_the_others_stay(finetuned, mode):
    make, task = finetuned
    encoder, task = make("last:1"), replace(task, mode=mode)
    start = encoder.pretrained.backbone.body.state_dict()
    start = {name: value.clone() for name, value in start.items()}
    stages = started(encoder, task, epochs=1)
    stages[-1].try_out()
    blocks = sorted({name.split(".")[0] for name in start}, key=int)
    for done in stages:
        moved = changed(start, done.method.backbone.body.state_dict())
        assert {name.split(".")[0] for name in moved} == {blocks[-1]}
        learned = {name for name, _ in done.method.backbone.body.named_parameters()} & moved
        assert learned == {n for n in parameters(done.method.backbone) if n[0] == blocks[-1]}
    now = encoder.pretrained.backbone.body.state_dict()
    assert not changed(start, now), "the encoder has moved"


def test_a_whole_network_may_be_trained(finetuned):
    make, task = finetuned
    encoder = make()
    start = parameters(encoder.pretrained.backbone)
    known = Stages(encoder, task, base(epochs=1)).known()
    known.try_out()
    assert changed(start, parameters(known.method.backbone)) == set(start)
    assert not changed(start, parameters(encoder.pretrained.backbone))


def test_more_blocks_than_there_are_are_refused():
    deep = Backbone(nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(11))), 2)
    for network, most in ((build_backbone("small", 32), 3), (deep, 11)):
        with pytest.raises(UsageError, match=rf"has {most} blocks; give at most last:{most}"):
            trainable_copy(network, f"last:{most + 1}")
        learn = {n for n, p in trainable_copy(network, "all").body.named_parameters()
                 if p.requires_grad}  # fmt: skip
        assert learn == {name for name, _ in network.body.named_parameters()}
    last = trainable_copy(deep, "last:1").train()
    assert {n for n, p in last.body.named_parameters() if p.requires_grad} == {
        "10.0.weight", "10.0.bias",
    }  # fmt: skip
    assert [module.training for module in last.body] == [False] * 10 + [True]
    assert all(p.requires_grad for p in deep.parameters())


def test_a_network_learns_from_views_of_the_size_that_images_are_encoded_at():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    images = open_images(pixels)
    settings = resolve(TrainConfig(backbone="small", batch_size=4), images, CPU)
    pretrained = Encoder(build_backbone("small", 32), 32, {})
    nothing = CachedFeatures(torch.zeros(8, 0), torch.zeros(0, 8, 0))
    encoder = FinetunedEncoder(pretrained, nothing, images, "all", settings, CPU)
    order = TwoStreamBatchSampler(*2 * [np.zeros(0, np.int64)], np.arange(8), 4, 0)
    batch = next(encoder.feed(order, METHODS["simgcd"], np.full(8, UNLABELED)).load(0, 1))
    assert {view.shape for view in batch.views} == {(4, 3, 32, 32)}


def test_a_finetuned_encoder_extracts_features_by_the_trained_network(finetuned):
    make, task = finetuned
    encoder = make()
    known = Stages(encoder, task, base(epochs=1)).known()
    known.try_out()
    cached, layer = encoder.features(known.method, with_views=True)
    method, views = Encoder(known.method.backbone, 8, {}), ViewSettings("characters", NUM_VIEWS, 0)
    expected = Extraction(method, encoder.images, views, CPU, 0).compute().features
    assert torch.equal(layer(cached.center), expected.center)
    assert torch.equal(cached.views, expected.views)
