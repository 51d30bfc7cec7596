"""Methods without negatives, from the papers: BYOL (Grill et al. 2020), SimSiam (Chen & He 2021).

And the momentum of every method whose target slows to a halt.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from small import assert_same_gradient, double_at, scattered, small

from nearkin.training.optimizer import build_optimizer, set_learning_rates, warmup_cosine


def measured_momentum(method, progress):
    """How much of itself the target keeps at a commit, measured."""
    memo = scattered(method)(double_at(0), progress).memo
    online = next(method.online.parameters()).detach()
    before = next(method.target.parameters()) - online
    method.commit(memo, progress)
    after = next(method.target.parameters()) - online
    return float((after * before).sum() / before.square().sum())


@pytest.mark.parametrize("name", ["byol", "moco_v3", "dino"])
def test_the_momentum_rises_to_one_along_half_a_cosine(name):
    """1 - (1 - m) (cos(pi k / K) + 1) / 2, at every quarter of training."""
    methods = [small(name, momentum=0.99).double() for _ in range(5)]
    measured = [measured_momentum(method, quarter / 4) for quarter, method in enumerate(methods)]
    assert measured == pytest.approx([0.99, 0.9914645, 0.995, 0.9985355, 1.0], abs=1e-7)
    if name == "byol":  # where it may be told to stay
        method = small(name, momentum=0.9, rising_momentum=False).double()
        assert measured_momentum(method, 0.5) == pytest.approx(0.9)


# BYOL


def byol_loss(method, batch):
    """Equation 2, summed over both directions, with a target that is a constant."""
    total = 0.0
    for view, other in ((0, 1), (1, 0)):
        p = method.predictor(method.online(batch.views[view]))
        z = method.target(batch.views[other]).detach()
        total = total + (F.normalize(p) - F.normalize(z)).square().sum(dim=1).mean()
    return total


def test_byol_predicts_the_targets_of_both_large_views_from_every_other_view():
    method, batch = scattered(small("byol").double()), double_at(0, num_views=4)
    distances = []
    for i, j in [(1, 0), (2, 0), (3, 0), (0, 1), (2, 1), (3, 1)]:
        p = F.normalize(method.predictor(method.online(batch.views[i])))
        z = F.normalize(method.target(batch.views[j])).detach()
        distances.append((p - z).square().sum(dim=1).mean())
    expected = 2 * sum(distances) / 6
    assert_same_gradient(method(batch, 0.5).loss, expected, method)


def test_byol_sums_the_squared_distances_of_both_directions():
    method, batch = scattered(small("byol").double()), double_at(0)
    result, expected = method(batch, 0.5).loss, byol_loss(method, batch)
    assert 0 < result < 8
    assert_same_gradient(result, expected, method)


def test_the_batch_statistics_of_a_target_are_its_own():
    """They come from its own batches; the online network's never reach them."""
    method = scattered(small("byol").double())
    alone = copy.deepcopy(method.target)
    for step in range(3):
        batch = double_at(step)
        for view in batch.views:
            alone(view)
        method.commit(method(batch, 0.5).memo, 1.0)  # the target stays where it is
    for name, statistics in alone.named_buffers():
        assert torch.equal(dict(method.target.named_buffers())[name], statistics)
    of_online = dict(method.online.named_buffers())["backbone.body.2.running_mean"]
    assert not torch.equal(of_online, alone.backbone.body[2].running_mean)


# SimSiam


def simsiam_loss(method, batch):
    """Equations 1, 2 and 4: the mean negative cosine, with embeddings that are constants."""
    z1, z2 = (method.online(view) for view in batch.views)
    p1, p2 = (method.predictor(z) for z in (z1, z2))
    pairs = ((p1, z2), (p2, z1))
    return -sum(torch.cosine_similarity(p, z.detach()).mean() for p, z in pairs) / 2


@pytest.mark.parametrize("predictor", [True, False])
def test_simsiam_is_the_mean_negative_cosine_and_stops_the_gradient(predictor):
    method, batch = small("simsiam", predictor=predictor).double(), double_at(0)
    result, expected = method(batch, 0.5).loss, simsiam_loss(method, batch)
    assert -1 < result < 1
    assert_same_gradient(result, expected, method)


def test_without_a_predictor_stopping_the_gradient_halves_it_and_no_more():
    batch, results = double_at(0), []
    for stop in (True, False):
        method = small("simsiam", predictor=False, stop_gradient=stop).double()
        loss = method(batch, 0.5).loss
        results.append((loss, torch.autograd.grad(loss, [*method.online.parameters()])))
    (stopped, halves), (free, wholes) = results
    assert torch.equal(stopped, free)
    torch.testing.assert_close([2 * half for half in halves], list(wholes))


@pytest.mark.parametrize("predictor", [True, False])
def test_the_predictors_learning_rate_stays_at_its_peak(predictor):
    method = small("simsiam", predictor=predictor)
    optimizer = build_optimizer(method, name="sgd", lr=0.2, weight_decay=0.0)
    names = {id(p): name.split(".")[0] for name, p in method.named_parameters()}
    for progress, share in ((0.0, 1.0), (0.5, 0.5), (1.0, 0.0)):
        set_learning_rates(optimizer, method, warmup_cosine(), progress)
        due = {names[id(p)]: g["lr"] for g in optimizer.param_groups for p in g["params"]}
        expected = {"online": pytest.approx(0.2 * share)}
        assert due == expected | ({"predictor": 0.2} if predictor else {})
