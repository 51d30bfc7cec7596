"""Momentum contrast, its baselines and its third version, from the papers."""

import pytest
import torch
import torch.nn.functional as F
from small import BATCH, assert_same_gradient, double_at, scattered, small

from nearkin.networks.branch import shuffle_bn
from nearkin.objectives import unit
from nearkin.types import Batch

SEED = 7


def moco(name="moco", **options):
    """In double precision, with a target that is not a copy any more."""
    method = small(name, **options).double()
    return scattered(method) if hasattr(method, "target") else method


def numbers(method):
    return torch.cat([p.detach().flatten() for p in method.parameters()])


def forward(method, batch):
    torch.manual_seed(SEED)  # the order of keys
    return method(batch, 0.5)


@torch.no_grad()
def keys(method, view):
    return unit(shuffle_bn(method.target, view))


def cross_entropy(query, key, queue, temperature):
    """Algorithm 1: the key first, the queue after, and labels of zero."""
    logits = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.keys.T], 1)
    return F.cross_entropy(logits / temperature, torch.zeros(BATCH, dtype=torch.long))


def test_the_loss_is_the_cross_entropy_of_the_key_first_and_the_queue_after():
    """Unmasked, as in the official code, a query meets its own older entry too."""
    method, batch = moco(temperature=0.07, mask_own=False).eval(), double_at(0)
    query, key = unit(method.online(batch.views[0])), unit(method.target(batch.views[1])).detach()
    method.queue.enqueue(key, batch.index)
    expected = cross_entropy(query, key, method.queue, 0.07)
    torch.testing.assert_close(method(batch, 0.5).loss, expected)


def test_a_query_never_meets_its_own_older_entry():
    method, batch = moco().eval(), double_at(0)
    method.commit(method(batch, 0.5).memo, 0.5)
    assert torch.isin(batch.index, method.queue.index).all()
    query, key = unit(method.online(batch.views[0])), unit(method.target(batch.views[1]))
    losses = []
    for q, k, i in zip(query, key, batch.index):
        others = method.queue.keys[method.queue.index != i]
        losses.append(F.cross_entropy(torch.cat([k[None], others]) @ q / 0.2, torch.tensor(0)))
    torch.testing.assert_close(method(batch, 0.5).loss, torch.stack(losses).mean())


def test_symmetric_is_the_mean_of_both_directions_against_the_same_negatives():
    method, batch = moco().eval(), double_at(0)
    swapped = Batch(batch.views[::-1], batch.index, batch.label)
    directions = [method(b, 0.5) for b in (batch, swapped)]
    method.symmetric = True
    both = method(batch, 0.5)
    torch.testing.assert_close(both.loss, (directions[0].loss + directions[1].loss) / 2)
    torch.testing.assert_close(both.memo.keys, torch.cat([d.memo.keys for d in directions]))
    assert both.memo.images.tolist() == batch.index.tolist() * 2


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.99, 1.0])
def test_a_target_after_many_steps_is_the_closed_form(momentum):
    """m^t theta_0 + (1 - m^t) theta_q: frozen with all momentum, a copy with none."""
    method = moco(momentum=momentum)
    start, online = numbers(method.target), numbers(method.online)
    memo = method(double_at(0), 0.5).memo
    buffers = {name: b.clone() for name, b in method.target.named_buffers()}
    for _ in range(30):
        method.commit(memo, 0.5)
    share = momentum**30
    torch.testing.assert_close(numbers(method.target), share * start + (1 - share) * online)
    if momentum in (0, 1):
        assert torch.equal(numbers(method.target), start if momentum else online)
    assert all(torch.equal(b, buffers[name]) for name, b in method.target.named_buffers())


def test_shuffling_changes_whom_a_key_shares_its_statistics_with_and_nothing_else():
    method, view = moco(bn_groups=1), double_at(0).views[1]
    torch.testing.assert_close(keys(method, view), unit(method.target(view)).detach())  # in order
    method, view = moco(bn_groups=4), double_at(0).views[1]
    unshuffled = unit(method.target(view)).detach()
    shuffled = forward(method, double_at(0)).memo.keys
    assert not torch.isclose(shuffled, unshuffled).all(dim=1).any()
    torch.manual_seed(SEED)
    order = torch.randperm(BATCH)
    torch.testing.assert_close(shuffled[order], unit(method.target(view[order])).detach())
    query = unit(method.online(double_at(0).views[0]))
    expected = cross_entropy(query, shuffled, method.queue, 0.2)
    torch.testing.assert_close(forward(method, double_at(0)).loss, expected)


@pytest.mark.parametrize("key_encoder", ["same", "separate", "shared_backbone"])
def test_end_to_end_the_loss_is_the_cross_entropy_within_the_batch(key_encoder):
    method, batch = moco("moco_end_to_end", key_encoder=key_encoder).eval(), double_at(0)
    query, key = unit(method.online(batch.views[0])), unit(method.key_branch(batch.views[1]))
    expected = F.cross_entropy(query @ key.T / 0.2, torch.arange(BATCH))
    assert_same_gradient(method(batch, 0.5).loss, expected, method)  # of keys too


def test_end_to_end_keys_are_shuffled_too():
    method, batch = moco("moco_end_to_end", bn_groups=4), double_at(0)
    loss = forward(method, batch).loss
    torch.manual_seed(SEED)
    order = torch.randperm(BATCH)
    query, key = unit(method.online(batch.views[0])), unit(method.online(batch.views[1][order]))
    torch.testing.assert_close(loss, F.cross_entropy(query @ key.T / 0.2, order.argsort()))


def test_end_to_end_encoders_share_what_they_are_said_to_share():
    for key_encoder, shared in [
        ("same", {"backbone", "projector"}),
        ("separate", set()),
        ("shared_backbone", {"backbone"}),
    ]:
        method = small("moco_end_to_end", key_encoder=key_encoder)
        online, keys = (dict(b.named_parameters()) for b in (method.online, method.key_branch))
        assert online.keys() == keys.keys()
        found = {name.split(".")[0] for name in online if online[name] is keys[name]}
        apart = {name.split(".")[0] for name in online if online[name] is not keys[name]}
        assert (found, found & apart) == (shared, set()), key_encoder


def test_with_a_memory_bank_the_key_is_the_images_row_and_its_other_draws_are_left_out():
    method, batch = moco("moco_memory_bank", num_negatives=500).eval(), double_at(0, 1)
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
    method, batch = moco("moco_memory_bank", momentum=0.3).eval(), double_at(0, 1)
    before = method.bank.keys.clone()
    method.commit(method(batch, 0.5).memo, 0.5)
    query = unit(method.online(batch.views[0])).detach()
    moved = 0.3 * before[batch.index] + 0.7 * query
    torch.testing.assert_close(method.bank.keys[batch.index], F.normalize(moved))


def test_the_third_version_is_twice_the_temperature_times_both_cross_entropies():
    """Chen et al. 2021, algorithm 1: keys are all of the batch, the target's, and fixed."""
    method, batch = moco("moco_v3", temperature=0.2).eval(), double_at(0)
    losses = []
    for view, other in ((0, 1), (1, 0)):
        query = unit(method.predictor(method.online(batch.views[view])))
        key = unit(method.target(batch.views[other])).detach()
        losses.append(2 * 0.2 * F.cross_entropy(query @ key.T / 0.2, torch.arange(BATCH)))
    result, expected = method(batch, 0.5).loss, torch.stack(losses).sum()
    assert_same_gradient(result, expected, method)
