"""A batch in chunks: the gradients, statistics and memories of the whole one, in less memory."""

import copy

import pytest
import torch
from small import (
    BATCH,
    as_double,
    assert_same_state,
    batch_for,
    of_two_processes,
    run,
    shares,
    small,
)
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from nearkin.errors import UsageError
from nearkin.networks.batch_norm import normalize_in_groups
from nearkin.networks.branch import Backbone, Branch, set_chunk_size

SIZE = 4
TOGETHER = {"dino": 2, "rotnet": 4, "sigreg": 2, "simclr": 2, "simgcd": 2, "swav": 2}
"""How many views of an image a method shows its network at once, where it is not one."""

SOME = ["moco", "simclr", "uno"]
"""With groups of its own; with both views at once; with heads on the features."""
some_methods = pytest.mark.parametrize("name", SOME)


def chunked(name):
    method = small(name)
    assert any(isinstance(module, _BatchNorm) for module in method.online.modules())
    set_chunk_size(method, SIZE, BATCH)
    return method


def grouped(name):
    """The whole batch at once, with statistics over as many groups as there are chunks."""
    method = small(name)
    for branch in [module for module in method.modules() if isinstance(module, Branch)]:
        normalize_in_groups(branch, BATCH // SIZE * TOGETHER.get(name, 1))
    return method


def gradients(method, batch):
    torch.manual_seed(0)
    method.train()(batch, progress=0.5).loss.backward()
    return {name: p.grad for name, p in method.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", sorted({*SOME, *TOGETHER}))
def test_chunks_train_as_the_whole_batch_with_as_many_groups_does(name):
    """Losses, weights, running statistics, momentum branches and memories, over some steps."""
    result, expected = chunked(name).double(), grouped(name).double()
    losses, _ = run(result, name, until=3, batches=shares())
    expected_losses, _ = run(expected, name, until=3, batches=shares())
    assert losses == pytest.approx(expected_losses, rel=1e-10)
    assert_same_state(result.state_dict(), expected.state_dict(), rtol=1e-9, atol=1e-10)


@some_methods
def test_gradients_are_those_of_the_whole_batch(name):
    for dtype, close in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        batch = batch_for(name, 0) if dtype == torch.float32 else as_double(batch_for(name, 0))
        result, expected = (
            torch.cat([x.flatten() for x in gradients(method.to(dtype), batch).values()])
            for method in (chunked(name), grouped(name))
        )
        assert (result - expected).norm() <= close * expected.norm()


@some_methods
def test_statistics_move_in_the_forward_pass_alone(name):
    """And no more than a chunk of images is shown to a backbone."""
    method, rows = chunked(name), []
    for branch in [module for module in method.modules() if isinstance(module, Branch)]:
        branch.backbone.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    loss = method.train()(batch_for(name, 0), progress=0.5).loss
    before, forward = copy.deepcopy(method.state_dict()), len(rows)
    loss.backward()
    assert_same_state(method.state_dict(), before, rtol=0, atol=0)
    assert set(rows) == {SIZE}
    assert forward < len(rows) <= 2 * forward  # with gradient once more, momentum branches not


@some_methods
def test_names_stay_and_a_second_time_changes_nothing(name):
    method = chunked(name)
    before = list(method.modules())
    set_chunk_size(method, SIZE, BATCH)
    assert all(now is then for now, then in zip(method.modules(), before, strict=True))
    assert list(method.state_dict()) == list(small(name).state_dict())


def branch(*layers, dim=6):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, dim, 3), nn.BatchNorm2d(dim), nn.ReLU(), *layers)
    body.append(nn.AdaptiveAvgPool2d(1))
    return Branch(Backbone(body, dim), 8, 4).train()


def images(rows, side=5):
    return torch.randn(rows, 3, side, side, generator=torch.Generator().manual_seed(rows))


def saved_bytes(network, batch):
    """Bytes that wait for the backward pass, other than weights and images."""
    known = {x.untyped_storage().data_ptr() for x in (*network.parameters(), batch)}
    sizes = {}

    def pack(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = network(batch)
    assert result.requires_grad
    return sum(size for at, size in sizes.items() if at not in known)


def test_activations_do_not_wait_for_the_backward_pass():
    whole, parts = branch(), branch()
    set_chunk_size(parts, 8, 256)
    assert saved_bytes(parts, images(256)) < 0.01 * saved_bytes(whole, images(256))


def in_pieces(network, batch, size):
    """Chunks by hand: plain batch norms, nothing computed twice, statistics averaged at the end."""
    parts = []
    for rows in batch.split(size):
        buffers = {name: value.clone() for name, value in network.named_buffers()}
        parts.append((functional_call(network, buffers, (rows,)), buffers))
    for name, value in network.named_buffers():
        value.copy_(torch.stack([buffers[name].double() for _, buffers in parts]).mean(dim=0))
    return torch.cat([z for z, _ in parts])


def learned(network, z):
    """Every gradient and running statistic that a loss of all embeddings together leads to."""
    (z @ z.T).square().mean().backward()
    statistics = {k: v for k, v in network.state_dict().items() if "running" in k}
    return {name: p.grad for name, p in network.named_parameters()} | statistics


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_dropout_and_precision_are_the_same_when_chunks_are_computed_again(precision):
    plain, parts = branch(nn.Dropout(0.5)), branch(nn.Dropout(0.5))
    set_chunk_size(parts, 4, 12)
    results = []
    for network, forward in ((plain, lambda x: in_pieces(plain, x, 4)), (parts, parts)):
        torch.manual_seed(5)
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            z = forward(images(12))
        drawn = torch.get_rng_state()
        results.append(learned(network, z))
        assert torch.equal(torch.get_rng_state(), drawn)
    assert_same_state(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_views_of_two_sizes_are_in_chunks_of_one_size_each_and_projected_in_all_chunks():
    plain, parts = branch(), branch()
    set_chunk_size(parts, 4, 8)
    views = [images(8), images(8) + 1, images(8, side=3)]
    large = in_pieces(plain.backbone, torch.cat(views[:2]), 4)
    features = torch.cat([large, in_pieces(plain.backbone, views[2], 4)])
    expected = learned(plain, in_pieces(plain.projector, features, 4))
    result = learned(parts, torch.cat(parts.by_size(views)))
    assert_same_state(result, expected, rtol=1e-5, atol=1e-6)


def test_evaluation_knows_no_chunks_and_features_are_what_the_projector_is_given():
    plain, parts = branch(), branch()
    set_chunk_size(parts, 4, 12)
    assert torch.equal(parts.eval()(images(7)), plain.eval()(images(7)))
    parts = parts.train().double()
    (h,) = parts.features_by_size([images(12).double()])
    assert h.shape == (12, 6)
    assert torch.equal(h[:4], parts.backbone(images(12)[:4].double()))


def test_sizes_that_do_not_fit_are_refused():
    parts = branch()
    for size in (5, 24, 1, 0, -4):
        says = f"chunks of {size} images do not divide a batch of 12"
        with pytest.raises(UsageError, match=says):
            set_chunk_size(parts, size, 12)
    with pytest.raises(UsageError, match="8 chunks cannot have 4 groups"):
        set_chunk_size(small("moco"), 2, BATCH)
    set_chunk_size(parts, 4, 12)
    with pytest.raises(UsageError, match="10 rows are not chunks of 4"):
        parts(images(10))


def train_on_rank(rank: int):
    """What every method has learned, and what is said of a chunk on two processes."""
    learned = {}
    for name in SOME:
        method = chunked(name).double()
        losses, _ = run(method, name, until=3, batches=shares(rank, 2))
        learned[name] = losses, method.state_dict()
    with pytest.raises(UsageError) as refused:
        set_chunk_size(small("simclr"), BATCH, BATCH)
    return learned, str(refused.value)


def test_two_processes_do_what_one_does(tmp_path):
    ranks = of_two_processes(train_on_rank, tmp_path)
    for name in SOME:
        alone = chunked(name).double()
        expected, _ = run(alone, name, until=3, batches=shares())
        for learned, said in ranks:
            losses, state = learned[name]
            assert losses == pytest.approx(expected, rel=1e-9)
            assert_same_state(state, alone.state_dict(), rtol=1e-9, atol=1e-10)
            assert "a batch of 16 over 2 processes" in said
