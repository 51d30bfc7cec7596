"""Every objective against its paper's equation, spelled out in restated.py.

Golden values and theorems stand in the files beside this one, a family of objectives in each.
"""

import math
import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import restated
import torch
import torch.nn.functional as F
from jaxtyping import Float
from restated import agree, dot, gradients, lists, vectors
from torch import Tensor
from torch.autograd import gradcheck

from nearkin import objectives
from nearkin.objectives import (
    full_precision,
    in_batch,
    info_nce,
    look_up,
    neighborhood_targets,
    soft_match,
    unit,
)

SEEDS = range(16)
"""Of random shapes, temperatures and vectors."""

GAP = 1e-3
"""Least distance between what is chosen and what is not, where an objective chooses."""


def sizes(draw, small):
    """Batch, dimensions and keys."""
    return [draw.randint(1, most) for most in ((5, 5, 7) if small else (17, 33, 50))]


def randn(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def chance(*shape, seed):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def like(constant, x):
    """In double precision beside x in double precision, in single precision otherwise."""
    return constant.to(torch.promote_types(x.dtype, torch.float32))


def both(name, *constants, **options):
    """An objective and its slow twin, with what follows the tensors that learn."""
    fast, slow = getattr(objectives, name), getattr(restated, name)
    listed = [c.tolist() if isinstance(c, torch.Tensor) else c for c in constants]

    def in_the_precision_of(x):
        floating = lambda c: isinstance(c, torch.Tensor) and c.is_floating_point()
        return [like(c, x) if floating(c) else c for c in constants]

    return (
        lambda *inputs: fast(*inputs, *in_the_precision_of(inputs[0]), **options),
        lambda *inputs: slow(*inputs, *listed, **options),
    )


def contrast(seed, small=False):
    """Aligned pairs, shared negatives with ties among them, a mask, and a temperature."""
    draw = random.Random(seed)
    batch, dim, keys = sizes(draw, small)
    query, key = vectors(batch, dim, seed), vectors(batch, dim, seed + 1000)
    negatives = vectors(keys, dim, seed + 2000)
    negatives[draw.randrange(keys)] = key[0]
    negatives[draw.randrange(keys)] = negatives[0]
    same, t = chance(batch, keys, seed=seed) < 0.2, draw.choice([0.05, 0.07, 0.1, 0.2, 0.5, 1.0])
    count = draw.randint(1, 1000)
    normalizer = torch.tensor(count * math.exp(draw.gauss(0, 1)), dtype=torch.float64)
    label = torch.arange(batch) % draw.randint(1, 5) - draw.randint(0, 1)  # some have none
    pair, all_three = (query, key), (query, key, negatives)
    return {
        "info_nce": (*both("info_nce", t), all_three),
        "info_nce, masked": (*both("info_nce", t, same), all_three),
        "in_batch": (*both("in_batch", t), pair),
        "nt_xent": (*both("nt_xent", t), pair),
        "sup_con": (*both("sup_con", label, t), pair),
        "nce": (*both("nce", t, normalizer, count), all_three),
    }


def agreement(seed, small=False):
    """Embeddings of two views, of any length, about means that are not zero.

    Of two images each feature is standardized to 1 and -1, whatever it is: at least three.
    """
    draw = random.Random(seed)
    batch, dim = (max(size, least) for size, least in zip(sizes(draw, small), (3, 2)))
    a = 2 * randn(batch, dim, seed=seed) + randn(1, dim, seed=seed + 1)
    b = a + randn(batch, dim, seed=seed + 2)
    weights = {name: draw.uniform(0, 25) for name in ("invariance", "variance", "covariance")}
    off = draw.uniform(0, 1)
    return {
        "alignment": (
            lambda p, z: objectives.alignment(objectives.unit(p), objectives.unit(z)),
            restated.byol,
            (a, b),
        ),
        "barlow_twins": (*both("barlow_twins", off), (a, b)),
        "vicreg": (*both("vicreg", **weights), (a, b)),
        "sigreg": (*both("sigreg", vectors(3, dim, seed + 3)), (a,)),
    }


def assignment(seed, small=False):
    """Scores of images with prototypes, logits with a soft target, a teacher's or class shares."""
    draw = random.Random(seed)
    batch, classes, _ = sizes(draw, small)
    a, b = (randn(batch, classes + 1, seed=seed + step) for step in range(2))
    scores, epsilon, iterations = a.tanh(), draw.choice([0.05, 0.1, 0.5]), draw.randint(1, 5)
    scores[-1] = scores[0]
    same = chance(batch, batch, seed=seed) < 0.3
    probabilities = a.softmax(1), b.softmax(1)
    label = torch.arange(batch) % (classes + 2) - 1  # one in so many is not known
    student, teacher, keys = (vectors(n, 9, seed + n) for n in (batch, batch + 1, 7))
    seen_by_teacher = teacher[1:], keys, 0.2, draw.choice([0.05, 0.2])
    return {
        "soft_match": (*both("soft_match"), (20 * a, b.softmax(1))),
        "relational_distillation": (
            *both("relational_distillation", *seen_by_teacher),
            (student,),
        ),
        "gram": (*both("gram", teacher[1:]), (student,)),
        "sinkhorn": (*both("sinkhorn", epsilon, iterations), (scores,)),
        "pairwise_bce": (*both("pairwise_bce", same), probabilities),
        "classify": (*both("classify", label), (20 * a,)),
        "mean_entropy": (*both("mean_entropy"), probabilities[:1]),
        "consistency": (*both("consistency"), probabilities),
    }


def neighborhood(seed, small=False):
    """Pairs and a queue, of which some may be neighbors, drawn until the choice is clear."""
    draw = random.Random(seed)
    batch, dim, keys = sizes(draw, small)
    query, key, queue = (vectors(n, dim, seed + i) for i, n in enumerate((batch, batch, keys)))
    usable = chance(batch, keys, seed=seed) < 0.8
    t, weight, k = draw.choice([0.1, 0.2, 0.5]), draw.randint(0, 8) / 8, draw.randint(1, keys + 5)
    label, labels = (torch.arange(n) % draw.randint(1, 4) for n in (batch, keys))
    if not clear(look_up(query, queue, 1.0).masked_fill(~usable, -torch.inf), k):
        return neighborhood(seed + 10_000, small)

    def fast(targets, q, k, m):
        logits = look_up(q, m, t, own=k)
        target = targets(logits.detach())
        unseen = F.pad(~usable, (1, 0), value=False)
        return soft_match(logits.masked_fill(unseen, torch.finfo(logits.dtype).min / 2), target)

    def slow(loss, q, k, m):
        losses = []
        for i, may in enumerate(usable.tolist()):
            valid = [j for j in range(keys) if may[j]]
            others = [dot(q[i], m[j]) / t for j in valid]
            losses.append(
                loss(dot(q[i], k[i]) / t, others, [labels[j] == label[i] for j in valid])
            )
        return restated.mean(losses)

    def nearest(logits):
        options = dict(own_weight=weight, num_neighbors=k)
        return objectives.neighborhood_targets(logits, usable, **options)

    def of_class(logits):
        return objectives.class_targets(logits, label, labels, usable)

    inputs = query, key, queue
    return {
        "neighborhood": (
            partial(fast, nearest),
            partial(slow, lambda own, x, _: restated.neighborhood_loss(own, x, weight, k)),
            inputs,
        ),
        "supervised": (partial(fast, of_class), partial(slow, restated.supervised_loss), inputs),
    }


def mixtures(seed, small=False, uniform=False):
    """Easy keys of each query mixed with drawn ones, in thirds or evenly, until the choice is clear."""
    draw = random.Random(seed)
    batch, dim, novel = sizes(draw, small)
    count, draws, known = (draw.randint(1, 3 if small else 6) for _ in range(3))
    inputs = tuple(vectors(n, dim, seed + i) for i, n in enumerate((batch, novel, known)))
    easy = (novel * chance(batch, count, seed=seed)).long()
    drawn = (known * chance(batch, draws, count, seed=seed + 1)).long()
    mix = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    if uniform:  # not to a half, where opposite keys would vanish
        mix = 0.4 * chance(batch, draws, count, 1, seed=seed + 2).double()
    num_hard = draw.randint(1, 2 * count * draws + 3)
    rest = lists([easy, drawn, mix.expand(batch, draws, count, -1)])

    def hardest(*keys, most=num_hard):
        return objectives.mixed_negatives(*keys, easy, drawn, like(mix, keys[0]), most)

    if not clear(hardest(*inputs, most=1000), num_hard):
        return mixtures(seed + 10_000, small, uniform)
    # Their sum: in which order they come has no slope.
    return {
        "mixed, evenly" if uniform else "mixed, in thirds": (
            lambda *keys: hardest(*keys).sum(),
            lambda *keys: sum(map(sum, restated.mixed_negatives(*keys, *rest, num_hard))),
            inputs,
        )
    }


def clear(similarities, k):
    """Whether in every row the k largest stand clear of the rest."""
    ranked = similarities.sort(dim=1, descending=True).values
    if k >= ranked.shape[1]:
        return True
    last, following = ranked[:, k - 1], ranked[:, k]
    return bool(((last - following >= GAP) | following.isinf()).all())


FAMILIES = contrast, agreement, assignment, neighborhood, mixtures, partial(mixtures, uniform=True)
FAMILY = {name: family for family in FAMILIES for name in family(0)}
every_objective = pytest.mark.parametrize("name", FAMILY)


@every_objective
def test_a_value_is_the_papers(name):
    for seed in SEEDS:
        fast, slow, inputs = FAMILY[name](seed)[name]
        agree(fast(*inputs), slow(*lists(inputs)), rtol=1e-12, atol=1e-14)


@every_objective
def test_a_value_in_single_precision_is_the_papers(name):
    for seed in SEEDS:
        fast, slow, inputs = FAMILY[name](seed)[name]
        single = [x.float() for x in inputs]
        agree(fast(*single), slow(*lists(single)), rtol=1e-5, atol=2e-6)


def squared(function, *inputs):
    return function(*inputs).square().sum()


@every_objective
def test_a_gradient_in_single_precision_is_that_in_double(name):
    for seed in SEEDS:
        fast, _, inputs = FAMILY[name](seed)[name]
        single = [x.float() for x in inputs]
        exact = gradients(partial(squared, fast), [x.double() for x in single])
        for result, expected in zip(gradients(partial(squared, fast), single), exact):
            assert (result - expected).norm() <= 1e-4 * max(expected.norm(), 1)


@every_objective
def test_a_gradient_is_the_slope_of_the_value_in_every_direction(name):
    for seed in range(3):
        fast, _, inputs = FAMILY[name](seed, small=True)[name]
        leaves = tuple(x.clone().requires_grad_() for x in inputs)
        assert gradcheck(fast, leaves, eps=1e-6, atol=1e-6, rtol=1e-4), seed


@every_objective
def test_half_precision_inputs_are_computed_in_single_precision(name):
    fast, _, inputs = FAMILY[name](6)[name]
    rounded = [x.bfloat16() for x in inputs]
    expected = fast(*(x.float() for x in rounded))
    with torch.autocast("cpu", torch.bfloat16):
        result = fast(*rounded)
    assert result.dtype == torch.float32
    assert torch.equal(result, expected)


def test_what_is_no_tensor_is_refused_by_name():
    """Not by StopIteration, at which `map` would end without a word."""
    z = torch.eye(2)
    with pytest.raises(ValueError, match=r"^unit: x is of type ndarray, expected a tensor$"):
        list(map(unit, [z, z.numpy()]))
    for call, name in (
        (lambda: in_batch(z.numpy(), z.numpy(), 0.5), "query"),
        (lambda: in_batch(z, key=z.tolist(), temperature=0.5), "key"),
        (lambda: info_nce(z, z, z, 0.5, np.eye(2, dtype=bool)), "same"),
        (lambda: in_batch(z, None, 0.5), "key"),
        (lambda: neighborhood_targets(z, z.numpy() > 0, own_weight=1, num_neighbors=1), "usable"),
    ):
        with pytest.raises(ValueError, match=f": {name} is of type .*, expected a tensor"):
            call()
    assert look_up(z, z, 0.5, own=None).shape == (2, 2)  # which may be left out


def test_only_arguments_that_are_said_to_be_tensors_have_to_be():
    @full_precision
    def total(
        parts: Sequence[Float[Tensor, " dim"]],
        scale: Float[Tensor, ""] | float = 1.0,
        start: Float[Tensor, ""] | None = None,
    ) -> Float[Tensor, ""]:
        return sum(part.sum() for part in parts) * scale + (0 if start is None else start)

    one = torch.tensor(1.0)
    assert total([torch.ones(2)], 3.0, one) == total([torch.ones(2)], 3 * one, one) == 7
    assert total([torch.ones(2)], 3 * one) == 6
    with pytest.raises(ValueError, match="total: start is of type float, expected a tensor"):
        total([torch.ones(2)], one, 1.0)
    with pytest.raises(ValueError, match="total: no argument is a tensor"):
        total([torch.ones(2)])


@every_objective
def test_autocast_changes_nothing_in_single_precision(name):
    fast, _, inputs = FAMILY[name](6)[name]
    outcomes = []
    for enabled in (False, True):
        leaves = [x.float().requires_grad_() for x in inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value = fast(*leaves)
        outcomes.append([value, *torch.autograd.grad(value.square().sum(), leaves)])
    assert all(map(torch.equal, *outcomes))


@every_objective
def test_a_batch_of_one_image_many_times_is_finite(name):
    fast, _, inputs = FAMILY[name](2)[name]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        alike = [x[:1].expand_as(x).to(dtype).clone().requires_grad_() for x in inputs]
        value = fast(*alike)
        slopes = torch.autograd.grad(value.float().sum(), alike)
        assert all(x.isfinite().all() for x in (value, *slopes)), dtype
