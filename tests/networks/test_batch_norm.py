"""Batch norm over groups: what as many plain ones would do apart, on any number of processes."""

import copy
import gc
import weakref

import pytest
import torch
from small import in_group, spawn
from torch import nn

from nearkin.errors import UsageError
from nearkin.networks.backbone import build_backbone
from nearkin.networks.batch_norm import GroupedBatchNorm, Moments, normalize_in_groups

BATCH = 24


def test_moments_that_nobody_asks_gradients_of_are_freed_with_their_input():
    x = torch.randn(4, 3, requires_grad=True) * 2
    freed = weakref.ref(x)
    moments = Moments.apply(x)
    del x, moments
    gc.collect()
    assert freed() is None


def network(affine=True):
    """Both kinds of batch norm, the second one without scale and shift."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, affine=affine),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.BatchNorm1d(5, momentum=0.3, affine=False),
    )
    if affine:
        nn.init.uniform_(net[1].weight, 0.5, 2)
        nn.init.normal_(net[1].bias)
    return net.double()


def images():
    """Some, and a weight for every number a network gives: their sum is the loss."""
    g = torch.Generator().manual_seed(1)
    x = 3 + 2 * torch.randn(BATCH, 3, 4, 4, generator=g, dtype=torch.float64)
    return x, torch.randn(BATCH, 5, generator=g, dtype=torch.float64)


def outcome(net, x, weight):
    """What a network gives, every gradient, and its state afterwards."""
    x = x.clone().requires_grad_()
    y = net.train()(x)
    (y * weight).sum().backward()
    gradients = {name: p.grad for name, p in net.named_parameters()}
    return {"output": y.detach(), "input": x.grad, "gradients": gradients} | {
        "state": {name: s for name, s in net.state_dict().items() if "running" in name}
    }


def grouped(groups, **options):
    net = network(**options)
    normalize_in_groups(net, groups)
    return net


def close(result, expected):
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("groups", "affine"), [(2, True), (3, False), (12, True)])
def test_groups_do_what_a_plain_network_does_with_each_part(groups, affine):
    x, weight = images()
    result = outcome(grouped(groups, affine=affine), x, weight)
    plain, parts = network(affine), []
    start = copy.deepcopy(plain.state_dict())
    for rows, weights in zip(x.chunk(groups), weight.chunk(groups)):
        plain.load_state_dict(start)
        parts.append(copy.deepcopy(outcome(plain, rows, weights)))  # gradients add up
    close(result["output"], torch.cat([part["output"] for part in parts]))
    close(result["input"], torch.cat([part["input"] for part in parts]))
    close(result["gradients"], parts[-1]["gradients"])
    for name, statistics in result["state"].items():
        close(statistics, torch.stack([part["state"][name] for part in parts]).mean(dim=0))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("groups", "affine"), [(1, False), (2, True), (4, True), (4, False)])
def test_all_groups_in_one_kernel_are_what_each_is_by_itself(memory_format, groups, affine):
    """What a GPU computes, and a compiler sees; a CPU normalizes group by group."""
    norm = GroupedBatchNorm(network(affine)[1], groups)
    nn.init.normal_(norm.running_mean)
    x, _ = images()
    x = torch.cat([x, x[:, :1]], dim=1).contiguous(memory_format=memory_format)
    weight = torch.randn_like(x)
    outcomes = []
    for way in (lambda x: norm._all_groups(x, groups), lambda x: by_group(norm, x, groups)):
        norm.zero_grad()
        leaf = x.clone().requires_grad_()
        result, running = way(leaf)
        (result * weight).sum().backward()
        gradients = {name: p.grad for name, p in norm.named_parameters()}
        outcomes.append((result.detach(), running, leaf.grad, gradients))
    close(*outcomes)


def by_group(norm, x, groups):
    normalized, running = zip(*map(norm._one_group, x.chunk(groups)))
    return torch.cat(normalized), torch.stack(running)


def test_bfloat16_goes_in_and_comes_out_and_statistics_keep_float32():
    x = images()[0].bfloat16()
    norm = GroupedBatchNorm(nn.BatchNorm2d(3), 4)
    result, statistics = norm._all_groups(x, 4)
    wide, expected = norm._all_groups(x.float(), 4)
    assert (result.dtype, statistics.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(result, wide.bfloat16(), rtol=8e-3, atol=0)
    torch.testing.assert_close(statistics, expected)
    plain, net = network().float(), grouped(2).float()
    x = images()[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        output = net(x)
        expected = torch.cat([plain(part) for part in x.chunk(2)])
    assert output.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(output, expected)
    assert net[1].running_var.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_groups_keep_the_batch_once_for_the_gradient_in_its_precision(dtype):
    """In float32, four bytes a number, a batch norm of bfloat16 had kept twice as much."""
    kept = {}

    def note(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x

    x = torch.randn(32, 64, 8, 8, dtype=dtype).to(memory_format=torch.channels_last)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        GroupedBatchNorm(nn.BatchNorm2d(64), 8)._all_groups(x.requires_grad_(), 8)
    assert x.nbytes <= sum(x.untyped_storage().nbytes() for x in kept.values()) < 1.1 * x.nbytes


def test_a_copy_has_statistics_of_its_own_and_evaluation_does_not_know_of_groups():
    plain, net = network(), grouped(4)
    outcome(net, *images())
    plain.load_state_dict(net.state_dict())
    x, _ = images()
    with torch.no_grad():
        assert torch.equal(net.eval()(x), plain.eval()(x))
        alone = torch.cat([net(row) for row in x.split(1)])
    close(alone, plain(x).detach())
    net = grouped(4)
    twin = copy.deepcopy(net)
    before = copy.deepcopy(twin.state_dict())
    results = [outcome(net, *images()) for _ in range(3)]
    assert all(torch.equal(twin.state_dict()[name], before[name]) for name in before)
    close(outcome(twin, *images())["output"], results[0]["output"])
    assert [net[i].num_batches_tracked.item() for i in (1, 5)] == [3, 3]


def test_parameters_names_and_groups_once_given_stay_and_what_is_frozen_stays_frozen():
    net = network()
    net[1].eval()
    before, modules = net.state_dict(keep_vars=True), list(net)
    normalize_in_groups(net, 1)  # is left to the usual batch norm
    assert all(now is then for now, then in zip(net, modules))
    normalize_in_groups(net, 4)
    normalize_in_groups(net, 2)
    after = net.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert [module.training for module in net] == [True, False, True, True, True, True]
    assert [net[i].groups for i in (1, 5)] == [4, 4]


def test_batch_norms_without_a_moving_average_are_refused():
    for options in (dict(momentum=None), dict(track_running_stats=False)):
        with pytest.raises(UsageError, match="need a momentum and running statistics"):
            normalize_in_groups(nn.Sequential(nn.BatchNorm1d(3, **options)), 2)


def test_networks_of_timm_keep_their_activations_and_names():
    """Its batch norms activate as well. Groups are as good as batches of their own, to the end."""
    torch.manual_seed(0)
    plain = build_backbone("timm/efficientnet_b0", 32).double()
    net = copy.deepcopy(plain)
    normalize_in_groups(net, 2)
    grouped = [module for module in net.modules() if isinstance(module, GroupedBatchNorm)]
    assert any(isinstance(module.act, nn.SiLU) for module in grouped)
    assert list(net.state_dict()) == list(plain.state_dict())
    x = torch.randn(8, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        result, expected = net.train()(x), torch.cat([plain.train()(part) for part in x.chunk(2)])
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)
        plain.load_state_dict(net.state_dict())
        assert torch.equal(net.eval()(x), plain.eval()(x))


CASES = [(2, 1), (2, 4), (4, 2)]
"""Numbers of processes and of groups."""


def on_rank(rank: int, out: str) -> None:
    """The first processes of four, as many as a case needs, each with its rows of the batch."""
    for world, groups in [*CASES, (3, 2)]:
        if rank >= world:
            continue
        with in_group(rank, world, f"{out}/rendezvous-{world}-{groups}"):
            net = grouped(groups)
            x, weight = (part.chunk(world)[rank] for part in images())
            try:
                result = outcome(net, x, weight)
            except UsageError as error:
                result = str(error)
            torch.save(result, f"{out}/{world}-{groups}-{rank}.pt")


def test_processes_together_do_what_one_does_alone(tmp_path):
    spawn(on_rank, str(tmp_path), processes=4)
    for world, groups in CASES:
        expected = outcome(grouped(groups), *images())
        parts = [torch.load(tmp_path / f"{world}-{groups}-{rank}.pt") for rank in range(world)]
        for what in ("output", "input"):
            close(torch.cat([part[what] for part in parts]), expected[what])
        for name, gradient in expected["gradients"].items():
            close(torch.stack([part["gradients"][name] for part in parts]).sum(dim=0), gradient)
        for part in parts:
            close(part["state"], expected["state"])
    for rank in range(3):
        message = torch.load(tmp_path / f"3-2-{rank}.pt")
        assert message.startswith("3 processes cannot share 2 groups of batch statistics evenly")
