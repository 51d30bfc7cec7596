"""The fused forms of the objectives against the plain ones, and that they are taken and stay small."""

import platform
from itertools import product as pairs

import pytest
import torch
import torch.nn.functional as F
from restated import vectors
from small import Observed
from torch.utils._pytree import tree_leaves

from nearkin.objectives import fused, in_batch, info_nce, look_up, nt_xent
from nearkin.objectives.contrast import infonce_from_lse, masked_logsumexp
from nearkin.objectives.fused import product

on_every_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.needs("cuda"))]
)
DOUBLE, SINGLE = torch.float64, torch.float32
TOLERANCE = {DOUBLE: 1e-12, SINGLE: 1e-5}


def plain_info_nce(query, key, negatives, t, same=None):
    positive = (query * key).sum(dim=1) / t
    return infonce_from_lse(positive, masked_logsumexp(look_up(query, negatives, t), same))


def plain_in_batch(query, key, t):
    return plain_info_nce(query, key, key, t, torch.eye(len(key), device=key.device).bool())


def plain_nt_xent(a, b, t):
    z, partners = torch.cat([a, b]), torch.cat([b, a])
    return plain_info_nce(
        z, partners, z, t, torch.eye(len(a), device=a.device).bool().repeat(2, 2)
    )


def outcomes(loss, *inputs):
    """The value, and the gradient of each input that has one."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = loss(*leaves)
    slopes = torch.autograd.grad(value, leaves, allow_unused=True)
    return [value.detach(), *(slope for slope in slopes if slope is not None)]


def alike(result, expected, tolerance, case=()):
    """In value, and each gradient in length."""
    for x, y in zip(result, expected, strict=True):
        assert x.isfinite().all(), case
        assert (x - y).norm() <= tolerance * y.norm() + 1e-30, case


def compare(fast, plain, inputs, *constants):
    """Both forms of a loss, in value and in the gradients of its inputs."""
    result, expected = (outcomes(lambda *x: f(*x, *constants), *inputs) for f in (fast, plain))  # noqa: B023
    dtype, sizes = inputs[0].dtype, [x.shape for x in inputs]
    alike(result, expected, TOLERANCE[dtype], (dtype, *sizes, *constants))


def units(*sizes, dim=32, device="cpu", dtype=torch.float32):
    return [vectors(n, dim, seed).to(device, dtype) for seed, n in enumerate(sizes)]


def same_image_mask(rows, keys, device="cpu"):
    """Each query has two of its own among the first 300 keys; the fourth has none."""
    same = torch.zeros(rows, keys, dtype=torch.bool, device=device)
    place = torch.arange(rows, device=device)
    same[place, (place * 37) % 300] = True
    same[place, (place * 11 + 5) % 300] = True
    same[3] = False
    return same


DICTIONARIES = [
    *[(DOUBLE, 1, 0.03, 3001), (SINGLE, 1, 1.0, 512), (SINGLE, 3, 0.03, 3001)],
    *[(DOUBLE, 3, 0.07, 512), (SINGLE, 12, 0.07, 512), (DOUBLE, 12, 1.0, 3001)],
    *[(SINGLE, 37, 1.0, 3001), (DOUBLE, 37, 0.03, 512), (SINGLE, 128, 0.03, 512)],
    *[(DOUBLE, 128, 0.07, 3001), (SINGLE, 256, 0.07, 3001), (DOUBLE, 256, 1.0, 512)],
]
"""Precision, dimensions, temperature and keys: every pair of the first three but a few."""


@on_every_device
def test_a_sum_over_a_dictionary_is_that_of_its_logits(device):
    for dtype, dim, t, keys in DICTIONARIES:
        query, negatives = units(300, keys, dim=dim, device=device, dtype=dtype)  # several blocks
        for same in (None, same_image_mask(300, keys, device)):
            compare(
                lambda q, *rest: fused.dictionary_logsumexp(q, *rest).sum(),
                lambda q, keys, t, same: masked_logsumexp(look_up(q, keys, t), same).sum(),
                [query],
                *(negatives, t, same),
            )


@on_every_device
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_contrast_with_a_queue_is_that_of_its_logits(device, dtype):
    """Whatever share of it shows the query's own image."""
    query, key, queue = units(130, 130, 8205, device=device, dtype=dtype)
    chance = torch.rand(130, 8205, generator=torch.Generator().manual_seed(0))
    for share, t in [(0.0001, 0.01), (0.001, 0.2), (0.3, 0.2), (0.3, 1.0), (1.0, 0.01)]:
        same = (chance < share).to(device)
        same[2] = True
        in_reach = fused.in_reach(query, t)
        assert dtype == DOUBLE or in_reach == (device == "cpu" and t > 0.02)
        compare(info_nce, plain_info_nce, [query, key], queue, t, same)


@on_every_device
@pytest.mark.parametrize("dim", [1, 32])
def test_how_tensors_lie_in_memory_changes_nothing(device, dim):
    query, keys = units(64, 8192, dim=dim, device=device)
    expected = fused.dictionary_logsumexp(query, keys, 0.1)
    for lie in (lambda x: x.T.contiguous().T, lambda x: x.repeat_interleave(2, dim=1)[:, ::2]):
        assert torch.equal(fused.dictionary_logsumexp(lie(query), lie(keys), 0.1), expected)


@pytest.mark.parametrize("t", [0.03, 0.1])
def test_a_queue_leaves_digits_where_the_positive_wins_by_far(t):
    query, rest = torch.eye(256)[:64], torch.eye(256)[64:].repeat(50, 1)
    assert fused.in_reach(query, t)
    result = outcomes(lambda q: info_nce(q, query, rest, t), query)
    exact = outcomes(lambda q: plain_info_nce(q, query.double(), rest.double(), t), query.double())
    assert exact[0] > 0
    alike(result, exact, 1e-5)


def test_equal_keys_cost_the_logarithm_of_their_number():
    (key,) = units(1, dim=8)
    loss = info_nce(key.expand(16, 8), key.expand(16, 8), key.expand(65536, 8), 0.07)
    assert loss.item() == pytest.approx(11.0903701476, rel=1e-6)


def test_an_entry_of_ones_own_that_is_nearest_by_far_is_left_out_without_a_trace():
    """It outweighs all others by e^200: subtracted from their sum it would leave nothing."""
    (query,) = units(64)
    queue = torch.cat([query, -query.repeat(200, 1)])
    same = torch.eye(64, len(queue), dtype=torch.bool)
    same[:, 64:] = query @ queue[64:].T > 0.2
    result = outcomes(lambda q: info_nce(q, -query, queue, 0.01, same), query)
    exact = outcomes(
        lambda q: plain_info_nce(q, -query.double(), queue.double(), 0.01, same), query.double()
    )
    alike(result, exact, 1e-4)


def test_queries_whose_whole_queue_is_their_own_have_nothing_to_learn():
    query, key, queue = units(64, 64, 8192)
    result = outcomes(
        lambda q: info_nce(q, key, queue, 0.1, torch.ones(64, 8192, dtype=torch.bool)), query
    )
    assert all(torch.equal(x, torch.zeros_like(x)) for x in result)


SHAPES = [(1, 1, 1), (1, 5, 3), (64, 1, 7), (33, 128, 17), (200, 37, 1)]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products_are_those_of_torch(dtype):
    """However the factors lie in memory."""
    for (rows, inner, columns), *turned in pairs(SHAPES, (False, True), (False, True)):
        a, b = vectors(rows, inner, 0).to(dtype), vectors(inner, columns, 1).to(dtype)
        lain = [x.T.contiguous().T if turn else x for x, turn in zip((a, b), turned, strict=True)]
        torch.testing.assert_close(product(*lain), a @ b, rtol=1e-5, atol=1e-6)


def test_a_processor_that_has_onednn_multiplies_by_it():
    able = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()
    a, b = vectors(5, 4).float(), vectors(4, 6).float()
    product(a, b)  # whether it is there and right is asked once
    names = []
    with Observed(lambda operation, *_: names.append(str(operation))):
        product(a, b)
    assert any("mkldnn" in name for name in names) == able


# Against each other, in strips

LARGE = [(DOUBLE, 0.01), (SINGLE, 0.01), (SINGLE, 0.07), (DOUBLE, 1.0), (SINGLE, 1.0)]


@on_every_device
def test_contrast_in_a_large_batch_is_that_of_its_logits(device, monkeypatch):
    monkeypatch.setattr(fused, "STRIP", {"cpu": 2**15, "cuda": 2**15})  # several
    for dtype, t in LARGE:
        inputs = units(333, 333, dim=37, device=device, dtype=dtype)
        assert fused.should_fuse(*inputs)
        compare(in_batch, plain_in_batch, inputs, t)


@on_every_device
def test_contrast_with_keys_that_learn_is_that_of_its_logits(device):
    for dtype, t in LARGE:
        inputs = units(257, 257, 3000, dim=37, device=device, dtype=dtype)
        for same in (None, same_image_mask(257, 3000, device)):
            compare(info_nce, plain_info_nce, inputs, t, same)


@pytest.mark.parametrize("learns", range(3))
def test_what_does_not_learn_changes_nothing_for_what_does(learns):
    inputs = units(257, 257, 300)
    expected = torch.autograd.grad(
        fused.strip_info_nce(*(x.requires_grad_() for x in inputs), 0.1), inputs[learns]
    )
    inputs = [x.detach().requires_grad_(i == learns) for i, x in enumerate(inputs)]
    result = torch.autograd.grad(fused.strip_info_nce(*inputs, 0.1), inputs[learns])
    assert torch.equal(*result, *expected)


def test_one_negative_is_enough():
    query, key, negative = units(2**16, 2**16, 1, dim=3)
    behind = query @ negative[0] - (query * key).sum(dim=1)
    expected = F.softplus(behind.double() / 0.1, threshold=1e9).mean()
    for learns in (False, True):
        loss = info_nce(query, key, negative.requires_grad_(learns), 0.1)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@on_every_device
def test_views_of_a_large_batch_are_told_apart_as_by_their_logits(device):
    for dtype, images, t in [
        *[(DOUBLE, 256, 0.01), (SINGLE, 256, 0.05), (SINGLE, 513, 0.01), (DOUBLE, 513, 1.0)],
        *[(SINGLE, 700, 1.0), (DOUBLE, 700, 0.05)],
    ]:
        pair = units(images, images, dim=37, device=device, dtype=dtype)
        in_reach = fused.in_reach(pair[0], t)
        assert in_reach == (device == "cpu" and (t >= 0.05 or dtype == DOUBLE))
        compare(nt_xent, plain_nt_xent, pair, t)


def test_views_that_are_all_alike_cost_the_logarithm_of_their_number():
    z = vectors(1, 8).float().expand(300, 8)
    assert nt_xent(z, z, 0.1).item() == pytest.approx(6.3952615981, rel=1e-6)
    assert in_batch(z, z, 0.1).item() == pytest.approx(5.7037824747, rel=1e-6)


def test_views_too_long_for_exponentials_are_told_apart_plainly():
    a, b = (x * 10 for x in units(300, 300))
    alike([nt_xent(a, b, 0.2)], [plain_nt_xent(a.double(), b.double(), 0.2)], 1e-5)


EVERY = {
    "info_nce": lambda a, b, n: info_nce(a, b, n.detach(), 0.1),
    "info_nce, masked": lambda a, b, n: info_nce(
        a, b, n.detach(), 0.1, same_image_mask(len(a), len(n))
    ),
    "info_nce, keys learn": lambda a, b, n: info_nce(a, b, n, 0.1),
    "in_batch": lambda a, b, _: in_batch(a, b, 0.1),
    "nt_xent": lambda a, b, _: nt_xent(a, b, 0.1),
}
every_form = pytest.mark.parametrize("loss", EVERY.values(), ids=EVERY)


@pytest.mark.parametrize("rows", [20, 300])
def test_a_temperature_may_learn_in_a_batch_of_any_size(rows):
    a, b, queue = units(rows, rows, 2000)
    t = torch.tensor(0.1)
    for loss, plain in [(in_batch, plain_in_batch), (nt_xent, plain_nt_xent)]:
        compare(loss, plain, [a, b, t])
    forms = (lambda a, b, t, f=f: f(a, b, queue, t) for f in (info_nce, plain_info_nce))
    compare(*forms, [a, b, t])


@every_form
def test_no_matrix_of_all_logits_is_ever_held(loss):
    inputs = [x.requires_grad_() for x in units(1100, 1100, 9000, dim=24)]
    held = []  # numbers above one byte each in what any operation returns

    def note(_operation, _args, _options, out):
        tensors = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        held.extend(x.numel() for x in tensors if x.dtype.is_floating_point)

    with Observed(note):
        loss(*inputs).backward()
    assert max(held) < min(1.3 * 2**20, 1100 * 1100)


@every_form
def test_half_precision_under_autocast_is_computed_in_single(loss):
    halves = [x.bfloat16() for x in units(300, 300, 2000)]
    with torch.autocast("cpu", torch.bfloat16):
        result = loss(*halves)
    assert result.dtype == torch.float32
    assert torch.equal(result, loss(*(x.float() for x in halves)))


@every_form
def test_the_same_batch_gives_the_same_bits(loss):
    inputs = units(300, 300, 2000)
    assert all(map(torch.equal, outcomes(loss, *inputs), outcomes(loss, *inputs)))


@every_form
def test_a_derivative_of_the_gradient_and_a_functional_one_are_errors(loss):
    a, b, n = (x.requires_grad_() for x in units(300, 300, 2000))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(loss(a, b, n), a, create_graph=True)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda a: loss(a, b, n))(a.detach())
