"""Methods without negatives, from the papers: BYOL (Grill et al. 2020), SimSiam (Chen & He 2021).

And the momentum of every method whose target slows to a halt.
"""

import copy
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from small import as_double, batch_at, small
from torch import nn

from nearkin.training.optimizer import build_optimizer, set_learning_rates, warmup_cosine
from nearkin.types import Batch


def at(step):
    return as_double(batch_at(step))


def scattered(method):
    """With a target that is not a copy any more."""
    with torch.no_grad():
        for parameter in method.target.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return method


def kinds(network):
    return [type(layer) for layer in network]


def gradients(loss, *modules):
    return torch.autograd.grad(loss, list(chain(*(m.parameters() for m in modules))))


# A momentum that rises


def measured_momentum(method, progress):
    """How much of itself the target keeps at a commit, measured."""
    memo = scattered(method)(at(0), progress).memo
    online = next(method.online.parameters()).detach()
    before = next(method.target.parameters()) - online
    method.commit(memo, progress)
    after = next(method.target.parameters()) - online
    return float((after * before).sum() / before.square().sum())


@pytest.mark.parametrize("name", ["byol", "moco_v3", "dino"])
@pytest.mark.parametrize(
    ("momentum", "quartiles"),
    [
        (0.996, [0.996, 0.9965858, 0.998, 0.9994142, 1.0]),
        (0.99, [0.99, 0.9914645, 0.995, 0.9985355, 1.0]),
    ],
)
def test_the_momentum_rises_to_one_along_half_a_cosine(name, momentum, quartiles):
    """1 - (1 - m) (cos(pi k / K) + 1) / 2, at every quarter of training."""
    methods = [small(name, momentum=momentum).double() for _ in range(5)]
    measured = [measured_momentum(method, quarter / 4) for quarter, method in enumerate(methods)]
    assert measured == pytest.approx(quartiles, abs=1e-7)


def test_a_momentum_that_does_not_rise_stays():
    for progress in (0.0, 0.4, 1.0):
        method = small("byol", momentum=0.9, rising_momentum=False).double()
        assert measured_momentum(method, progress) == pytest.approx(0.9)


# BYOL


def byol_loss(method, batch):
    """Equation 2, summed over both directions, with a target that is a constant."""
    total = 0.0
    for view, other in ((0, 1), (1, 0)):
        p = method.predictor(method.online(batch.views[view]))
        z = method.target(batch.views[other]).detach()
        total = total + (F.normalize(p) - F.normalize(z)).square().sum(dim=1).mean()
    return total


def test_byol_sums_the_squared_distances_of_both_directions():
    method, batch = scattered(small("byol").double()), at(0)
    result, expected = method(batch, 0.5).loss, byol_loss(method, batch)
    assert 0 < result < 8
    torch.testing.assert_close(result, expected)
    trained = method.online, method.predictor
    torch.testing.assert_close(gradients(result, *trained), gradients(expected, *trained))


def test_the_length_of_a_prediction_changes_nothing():
    method, batch = scattered(small("byol").double()), at(0)
    before = method(batch, 0.5).loss
    with torch.no_grad():
        for parameter in method.predictor[-1].parameters():
            parameter.mul_(3)
    torch.testing.assert_close(method(batch, 0.5).loss, before)


def test_the_batch_statistics_of_a_target_are_its_own():
    """They come from its own batches; the online network's never reach them."""
    method = scattered(small("byol").double())
    alone = copy.deepcopy(method.target)
    for step in range(3):
        batch = at(step)
        for view in batch.views:
            alone(view)
        method.commit(method(batch, 0.5).memo, 1.0)  # the target stays where it is
    for name, statistics in alone.named_buffers():
        assert torch.equal(dict(method.target.named_buffers())[name], statistics)
    of_online = dict(method.online.named_buffers())["backbone.body.2.running_mean"]
    assert not torch.equal(of_online, alone.backbone.body[2].running_mean)


def test_only_the_online_network_has_a_predictor_and_a_place_in_the_optimizer():
    method = small("byol")
    shapes = [[p.shape for p in branch.parameters()] for branch in (method.online, method.target)]
    assert shapes[0] == shapes[1]
    groups = build_optimizer(method, name="sgd", lr=0.1, weight_decay=0.0).param_groups
    held = {id(p) for group in groups for p in group["params"]}
    assert held == {id(p) for m in (method.online, method.predictor) for p in m.parameters()}


def test_byols_target_starts_as_a_copy_of_the_online_network():
    method = small("byol")
    for t, o in zip(method.target.parameters(), method.online.parameters()):
        assert torch.equal(t, o)


def test_byols_projector_and_predictor_are_the_papers():
    method = small("byol")
    layers = [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert kinds(method.online.projector) == kinds(method.predictor) == layers


# SimSiam


def simsiam_loss(method, batch):
    """Equations 1, 2 and 4: the mean negative cosine, with embeddings that are constants."""
    z1, z2 = (method.online(view) for view in batch.views)
    p1, p2 = (method.predictor(z) for z in (z1, z2))
    return -torch.cosine_similarity(p1, z2.detach()).mean() / 2 - (
        torch.cosine_similarity(p2, z1.detach()).mean() / 2
    )


@pytest.mark.parametrize("predictor", [True, False])
def test_simsiam_is_the_mean_negative_cosine_and_stops_the_gradient(predictor):
    method, batch = small("simsiam", predictor=predictor).double(), at(0)
    result, expected = method(batch, 0.5).loss, simsiam_loss(method, batch)
    assert -1 < result < 1
    torch.testing.assert_close(result, expected)
    trained = method.online, method.predictor
    torch.testing.assert_close(gradients(result, *trained), gradients(expected, *trained))


def test_without_a_predictor_stopping_the_gradient_halves_it_and_no_more():
    batch, results = at(0), []
    for stop in (True, False):
        method = small("simsiam", predictor=False, stop_gradient=stop).double()
        loss = method(batch, 0.5).loss
        results.append((loss, gradients(loss, method.online)))
    (stopped, halves), (free, wholes) = results
    assert torch.equal(stopped, free)
    torch.testing.assert_close([2 * half for half in halves], list(wholes))


def test_with_a_predictor_stopping_the_gradient_changes_its_direction():
    batch, directions = at(0), []
    for stop in (True, False):
        method = small("simsiam", stop_gradient=stop).double()
        loss = method(batch, 0.5).loss
        directions.append(torch.cat([g.flatten() for g in gradients(loss, method.online)]))
    assert torch.cosine_similarity(*directions, dim=0) < 0.99


def test_views_that_are_alike_and_predict_themselves_have_reached_the_bottom():
    """A loss of -1, and no gradient: also where the network has collapsed."""
    method, view = small("simsiam", predictor=False).double(), at(0).views[0]
    loss = method(Batch((view, view), at(0).index, at(0).label), 0.5).loss
    assert loss.item() == pytest.approx(-1.0, abs=1e-12)
    assert all(g.abs().max() < 1e-12 for g in gradients(loss, method.online))


@pytest.mark.parametrize("num_layers", [2, 3])
def test_simsiams_projector_ends_on_a_batch_norm_without_scale_and_shift(num_layers):
    """Section 3: every layer has one, the last no ReLU; the predictor's output has none."""
    method = small("simsiam", num_layers=num_layers)
    layers = [nn.Linear, nn.BatchNorm1d, nn.ReLU] * num_layers
    assert kinds(method.online.projector) == layers[:-1]
    norms = [m.affine for m in method.online.projector if isinstance(m, nn.BatchNorm1d)]
    assert norms == [True] * (num_layers - 1) + [False]
    assert kinds(method.predictor) == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert [p.bias is not None for p in method.predictor if isinstance(p, nn.Linear)] == [
        False,
        True,
    ]


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
