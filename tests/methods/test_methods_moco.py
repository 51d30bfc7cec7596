"""Momentum contrast, its baselines and its third version, from the papers."""

import math
from collections import deque
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from small import BATCH, as_double, batch_at, run, small
from torch import nn

from nearkin.networks.branch import shuffle_bn
from nearkin.objectives import unit
from nearkin.training.optimizer import build_optimizer
from nearkin.types import UNKNOWN, Batch

SEED = 7


def at(step, num_views=2):
    return as_double(batch_at(step, num_views))


def moco(name="moco", **options):
    """In double precision, with a target that is not a copy any more."""
    method = small(name, **options).double()
    if hasattr(method, "target"):
        with torch.no_grad():
            for parameter in method.target.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return method


def numbers(method):
    return torch.cat([p.detach().flatten() for p in method.parameters()])


def forward(method, batch):
    torch.manual_seed(SEED)  # the order of keys
    return method(batch, 0.5)


@torch.no_grad()
def keys(method, view):
    return unit(shuffle_bn(method.target, view))


def kinds(network):
    return [type(layer) for layer in network]


# The loss


def test_the_first_version_has_a_linear_projector_and_the_second_an_mlp_without_batch_norm():
    linear, deep = (moco(projector=p, hidden_dim=0) for p in ("linear", "mlp"))
    assert kinds(linear.online.projector) == [nn.Linear]
    assert kinds(deep.online.projector) == [nn.Linear, nn.ReLU, nn.Linear]
    assert deep.online.projector[0].out_features == 24  # that of the features


def test_the_loss_is_the_cross_entropy_of_the_key_first_and_the_queue_after():
    """Algorithm 1, with labels of zero."""
    method, batch = moco(temperature=0.07).eval(), at(0)
    query, key = unit(method.online(batch.views[0])), unit(method.target(batch.views[1]))
    logits = torch.cat([(query * key).sum(1, keepdim=True), query @ method.queue.keys.T], 1)
    expected = F.cross_entropy(logits / 0.07, torch.zeros(BATCH, dtype=torch.long))
    torch.testing.assert_close(method(batch, 0.5).loss, expected)


@pytest.mark.parametrize(("keys", "expected"), [(40, math.log(41)), (4096, 8.3180102775)])
def test_the_loss_of_embeddings_that_are_all_alike_is_the_golden_value(keys, expected):
    """log(K + 1)."""
    method = small("moco", queue_size=keys).double()
    for branch in (method.online, method.target):
        nn.init.zeros_(branch.projector[-1].weight)
        nn.init.zeros_(branch.projector[-1].bias)
    assert method(at(0), 0.5).loss.item() == pytest.approx(expected, abs=1e-9)


def test_a_query_never_meets_its_own_older_entry():
    method, batch = moco().eval(), at(0)
    method.commit(method(batch, 0.5).memo, 0.5)
    assert torch.isin(batch.index, method.queue.index).all()
    query, key = unit(method.online(batch.views[0])), unit(method.target(batch.views[1]))
    losses = []
    for q, k, i in zip(query, key, batch.index):
        others = method.queue.keys[method.queue.index != i]
        losses.append(F.cross_entropy(torch.cat([k[None], others]) @ q / 0.2, torch.tensor(0)))
    torch.testing.assert_close(method(batch, 0.5).loss, torch.stack(losses).mean())


def test_symmetric_is_the_mean_of_both_directions_against_the_same_negatives():
    method, batch = moco().eval(), at(0)
    swapped = Batch(batch.views[::-1], batch.index, batch.label)
    directions = [method(b, 0.5) for b in (batch, swapped)]
    method.symmetric = True
    both = method(batch, 0.5)
    torch.testing.assert_close(both.loss, (directions[0].loss + directions[1].loss) / 2)
    torch.testing.assert_close(both.memo.keys, torch.cat([d.memo.keys for d in directions]))
    assert both.memo.images.tolist() == batch.index.tolist() * 2


# What commit writes


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_queue_is_the_latest_keys_in_the_order_they_came(symmetric):
    """After the loss of their step, and over the end of the queue again and again."""
    method = moco(symmetric=symmetric, bn_groups=1)
    expected = deque([(UNKNOWN, None)] * 40, maxlen=40)
    for step in range(9):
        result = method(at(step), 0.5)
        assert not torch.isin(result.memo.keys, method.queue.keys).any()
        method.commit(result.memo, 0.5)
        expected.extend(zip(result.memo.images.tolist(), result.memo.keys))
        oldest_first = (torch.arange(40) + method.queue.cursor) % 40
        images, keys = zip(*expected)
        assert method.queue.index[oldest_first].tolist() == list(images)
        for row, key in zip(method.queue.keys[oldest_first], keys):
            assert key is None or torch.equal(row, key)
    assert UNKNOWN not in images


def test_the_target_follows_the_online_network_of_after_the_step():
    method = small("moco", momentum=0.9)
    before = [p.clone() for p in method.target.parameters()]
    run(method, "moco", start=(1, None), until=2)  # at step 0 the learning rate is zero
    for target, old, online in zip(method.target.parameters(), before, method.online.parameters()):
        torch.testing.assert_close(target, 0.9 * old + 0.1 * online)
    assert any(not torch.equal(a, b) for a, b in zip(before, method.online.parameters()))


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.99, 1.0])
def test_a_target_after_many_steps_is_the_closed_form(momentum):
    """m^t theta_0 + (1 - m^t) theta_q: frozen with all momentum, a copy with none."""
    method = moco(momentum=momentum)
    start, online = numbers(method.target), numbers(method.online)
    memo = method(at(0), 0.5).memo
    buffers = {name: b.clone() for name, b in method.target.named_buffers()}
    for _ in range(30):
        method.commit(memo, 0.5)
    share = momentum**30
    torch.testing.assert_close(numbers(method.target), share * start + (1 - share) * online)
    if momentum in (0, 1):
        assert torch.equal(numbers(method.target), start if momentum else online)
    assert all(torch.equal(b, buffers[name]) for name, b in method.target.named_buffers())


@pytest.mark.parametrize(("momentum", "half"), [(0.999, 692.8), (0.996, 172.9), (0.99, 68.97)])
def test_half_of_a_target_is_gone_after_its_half_life(momentum, half):
    method = moco(momentum=momentum)
    memo, online = method(at(0), 0.5).memo, numbers(method.online)
    start = (numbers(method.target) - online).norm()
    shares = []
    for _ in range(math.ceil(half)):
        method.commit(memo, 0.5)
        shares.append(float((numbers(method.target) - online).norm() / start))
    assert shares[-1] < 0.5 < shares[-2]


def test_the_target_gets_no_gradient_and_is_not_in_the_optimizer():
    method = moco()
    method(at(0), 0.5).loss.backward()
    assert all(p.grad is None for p in method.target.parameters())
    assert all(p.grad is not None for p in method.online.parameters())
    groups = build_optimizer(method, name="sgd", lr=0.1, weight_decay=0.0).param_groups
    held = {id(p) for group in groups for p in group["params"]}
    assert held == {id(p) for p in method.online.parameters()}


# Shuffled keys


def test_shuffled_keys_come_back_in_order():
    method, view = moco(bn_groups=1), at(0).views[1]
    torch.testing.assert_close(keys(method, view), unit(method.target(view)).detach())


def test_shuffling_changes_whom_a_key_shares_its_statistics_with():
    method, view = moco(bn_groups=4), at(0).views[1]
    unshuffled = unit(method.target(view)).detach()
    shuffled = forward(method, at(0)).memo.keys
    assert not torch.isclose(shuffled, unshuffled).all(dim=1).any()
    torch.manual_seed(SEED)
    order = torch.randperm(BATCH)
    torch.testing.assert_close(shuffled[order], unit(method.target(view[order])).detach())


def test_evaluation_does_not_know_of_groups_and_of_the_order():
    method, view = moco(bn_groups=4).eval(), at(0).views[1]
    torch.testing.assert_close(keys(method, view), unit(method.target(view)).detach())


def test_queries_are_not_shuffled():
    method, batch = moco(bn_groups=4), at(0)
    query = unit(method.online(batch.views[0]))
    key = forward(method, batch).memo.keys
    logits = torch.cat([(query * key).sum(1, keepdim=True), query @ method.queue.keys.T], 1)
    expected = F.cross_entropy(logits / 0.2, torch.zeros(BATCH, dtype=torch.long))
    torch.testing.assert_close(forward(method, batch).loss, expected)


# The baseline that goes end to end


@pytest.mark.parametrize("key_encoder", ["same", "separate", "shared_backbone"])
def test_end_to_end_the_loss_is_the_cross_entropy_within_the_batch(key_encoder):
    method, batch = moco("moco_end_to_end", key_encoder=key_encoder).eval(), at(0)
    query, key = unit(method.online(batch.views[0])), unit(method.key_branch(batch.views[1]))
    expected = F.cross_entropy(query @ key.T / 0.2, torch.arange(BATCH))
    parameters = list(method.parameters())
    loss = method(batch, 0.5).loss
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(  # keys included
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)
    )


def test_end_to_end_keys_are_shuffled_too():
    method, batch = moco("moco_end_to_end", bn_groups=4), at(0)
    loss = forward(method, batch).loss
    torch.manual_seed(SEED)
    order = torch.randperm(BATCH)
    query, key = unit(method.online(batch.views[0])), unit(method.online(batch.views[1][order]))
    torch.testing.assert_close(loss, F.cross_entropy(query @ key.T / 0.2, order.argsort()))


@pytest.mark.parametrize(
    ("key_encoder", "shared"),
    [
        ("same", {"backbone", "projector"}),
        ("separate", set()),
        ("shared_backbone", {"backbone"}),
    ],
)
def test_end_to_end_encoders_share_what_they_are_said_to_share(key_encoder, shared):
    method = small("moco_end_to_end", key_encoder=key_encoder)
    online, keys = (dict(b.named_parameters()) for b in (method.online, method.key_branch))
    assert online.keys() == keys.keys()
    assert {name for name in online if online[name] is keys[name]} == {
        name for name in online if name.split(".")[0] in shared
    }


def test_end_to_end_nothing_is_remembered():
    assert moco("moco_end_to_end")(at(0), 0.5).memo is None


# The baseline with a memory bank


def bank_of_images(**options):
    return moco("moco_memory_bank", **options).eval()


def test_with_a_memory_bank_the_key_is_the_images_row_and_its_other_draws_are_left_out():
    method, batch = bank_of_images(num_negatives=500), at(0, 1)
    loss = forward(method, batch).loss
    torch.manual_seed(SEED)
    drawn = method.bank.sample(500)
    assert (drawn[:, None] == batch.index).any()
    losses = []
    for q, i in zip(unit(method.online(batch.views[0])), batch.index):
        rows = method.bank.keys[torch.cat([i[None], drawn[drawn != i]])]
        losses.append(F.cross_entropy(rows @ q / 0.2, torch.tensor(0)))
    torch.testing.assert_close(loss, torch.stack(losses).mean())


def test_with_a_memory_bank_rows_are_visited_after_the_loss():
    method, batch = bank_of_images(momentum=0.3), at(0, 1)
    before = method.bank.keys.clone()
    method.commit(method(batch, 0.5).memo, 0.5)
    query = unit(method.online(batch.views[0])).detach()
    moved = 0.3 * before[batch.index] + 0.7 * query
    torch.testing.assert_close(method.bank.keys[batch.index], F.normalize(moved))


def test_with_a_memory_bank_there_is_one_encoder():
    method = bank_of_images()
    assert {name.split(".")[0] for name, _ in method.named_parameters()} == {"online"}


# The third version


def test_the_third_version_is_twice_the_temperature_times_both_cross_entropies():
    """Chen et al. 2021, algorithm 1: keys are all of the batch, the target's, and fixed."""
    method, batch = moco("moco_v3", temperature=0.2).eval(), at(0)
    losses = []
    for view, other in ((0, 1), (1, 0)):
        query = unit(method.predictor(method.online(batch.views[view])))
        key = unit(method.target(batch.views[other])).detach()
        losses.append(2 * 0.2 * F.cross_entropy(query @ key.T / 0.2, torch.arange(BATCH)))
    result, expected = method(batch, 0.5).loss, torch.stack(losses).sum()
    trained = list(chain(method.online.parameters(), method.predictor.parameters()))
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        torch.autograd.grad(result, trained), torch.autograd.grad(expected, trained)
    )


def test_the_third_version_has_the_projector_and_the_predictor_of_the_paper():
    """Batch norm everywhere, without scale and shift at the projector's end."""
    method = small("moco_v3")
    hidden = [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert kinds(method.online.projector) == [*hidden, nn.BatchNorm1d]
    assert not method.online.projector[-1].affine
    assert kinds(method.predictor) == hidden


def test_the_third_version_has_the_heads_of_the_papers_vision_transformers():
    """A projector of three layers, and batch norm without scale and shift at both ends."""
    method = small("moco_v3", num_layers=3, predictor_norm=True)
    inner = [nn.Linear, nn.BatchNorm1d, nn.ReLU]
    assert kinds(method.online.projector) == [*inner, *inner, nn.Linear, nn.BatchNorm1d]
    assert kinds(method.predictor) == [*inner, nn.Linear, nn.BatchNorm1d]
    assert not method.online.projector[-1].affine
    assert not method.predictor[-1].affine


def test_unmasked_a_query_meets_its_own_older_entry_as_in_the_official_code():
    method, batch = moco(mask_own=False).eval(), at(0)
    q, k = unit(method.online(batch.views[0])), unit(method.target(batch.views[1])).detach()
    method.queue.enqueue(k, batch.index)
    logits = torch.cat([(q * k).sum(dim=1, keepdim=True), q @ method.queue.keys.T], dim=1)
    expected = F.cross_entropy(logits / method.temperature, torch.zeros(BATCH, dtype=torch.long))
    torch.testing.assert_close(method(batch, 0.5).loss, expected)
