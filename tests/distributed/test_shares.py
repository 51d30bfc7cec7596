"""Terms that are divided among processes, and then are those of the whole batch.

Real processes over gloo, in double precision. Gradients are those that an optimizer would see: summed
over processes by `gather`, and averaged by DDP.
"""

import subprocess
import sys
from functools import partial

import pytest
import torch
from small import Observed, of_two_processes, shares, small
from torch import nn

from nearkin.distributed import data_parallel, gather, gather_all, rows_of_rank
from nearkin.distributed import mean_over_rows as mean_over_ranks
from nearkin.objectives import in_batch, info_nce, mean_over_rows, nt_xent, sup_con, unit, vicreg
from nearkin.objectives.numerics import dividing_rows

ROWS, DIM, KEYS, T = 12, 6, 30, 0.2
CLOSE = 1e-12
DIVIDED = [
    "dino", "instdisc", "instdisc_parametric", "moco", "moco_end_to_end", "moco_memory_bank",
    "moco_v3", "nnclr", "simclr",
]  # fmt: skip
"""Methods of which one process computes no product of the whole batch with anything."""


def against_keys(count, a, b, keys):
    a, b, same = a[:count], b[:count], torch.arange(count)[:, None] == torch.arange(KEYS) % 20
    return info_nce(a, b, keys, T, same)


def each_other(objective, a, b, keys):
    return objective(a, b, T)


def of_a_class(count, a, b, keys):
    return sup_con(a[:count], b[:count], torch.arange(count) % 3, T)


def whole(a, b, keys):
    return vicreg(a, b, invariance=1.0, variance=1.0, covariance=1.0)


def together(a, b, keys):
    """What is divided and what is not, in one loss that is not linear in them."""
    among_keys, among_views = against_keys(ROWS, a, b, keys), each_other(nt_xent, a, b, keys)
    return among_views.square() + whole(a, b, keys) * among_keys


TERMS = {
    "against keys that learn": partial(against_keys, ROWS),
    "against others of the batch": partial(each_other, in_batch),
    "against all other views": partial(each_other, nt_xent),
    "all of a class": partial(of_a_class, ROWS),
    "uneven shares": partial(of_a_class, 7),
    "fewer rows than processes": partial(against_keys, 1),
    "no row": partial(of_a_class, 0),
    "not divided": whole,
    "together": together,
}


class Learner(nn.Module):
    """Weights before and after the gathering, and keys that learn."""

    def __init__(self, term):
        super().__init__()
        torch.manual_seed(1)
        self.before, self.after = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.keys = nn.Parameter(unit(torch.randn(KEYS, DIM)))
        self.term = term

    def forward(self, first, second):
        a, b = (gather(self.before(view)) for view in (first, second))
        unused = 0 * self.keys.sum() + 0 * self.after.bias.sum()
        with dividing_rows(mean_over_ranks):
            return self.term(unit(self.after(a)), unit(b), self.keys) + unused


def outcome(term):
    """The loss, the gradients of all weights, and those of this process's rows."""
    generator = torch.Generator().manual_seed(2)
    views = torch.randn(2, ROWS, DIM, generator=generator, dtype=torch.float64)
    own = views[:, rows_of_rank(ROWS)].clone().requires_grad_()
    learner = Learner(term).double()
    wrapped = data_parallel(learner)  # which averages gradients for as long as it is there
    loss = wrapped(*own)
    loss.backward()
    return loss.detach(), [weight.grad for weight in learner.parameters()], own.grad


def products(name, rank=0, world=1):
    """How many multiplications the matrix products of a step take."""
    counts = []

    def count(operation, args, *_):
        if "mm" in operation.__name__:
            *_, left, right = args
            counts.append(left.numel() * right.shape[-1])

    method = small(name).double()
    with Observed(count):
        method(shares(rank, world)(name, 0), 0.5).loss.backward()
    return sum(counts)


def together_and_apart(rank):
    """Gathered tensors and their gradients, in one message for each kind and in one for each."""
    outcomes = []
    for several in (gather_all, lambda tensors: tuple(map(gather, tensors))):
        generator = torch.Generator().manual_seed(rank)
        rows = [torch.randn(3, *size, generator=generator) for size in ((4,), (2, 2), (5,), ())]
        rows = [x.requires_grad_() for x in rows[:2]] + rows[2:] + [torch.arange(3) + rank]
        messages = []
        with Observed(lambda op, *_, sent=messages: sent.append("allgather" in op.__name__)):
            gathered = several(rows)
        sum((k + 1) * x.sum() ** 2 for k, x in enumerate(gathered[:2])).backward()
        outcomes.append(
            (sum(messages), [x.detach() for x in gathered], [x.grad for x in rows[:2]])
        )
    return outcomes


def on_rank(rank):
    outcomes = {name: outcome(term) for name, term in TERMS.items()}
    rows = []
    with dividing_rows(mean_over_ranks):
        mean_over_rows(lambda part: rows.extend(range(7)[part]) or torch.zeros(()), 7)
        means = torch.tensor([rank, 1.0]), torch.tensor(1.0 - rank)
        mean = mean_over_rows(lambda _: means, 6)
    counts = {name: products(name, rank, 2) for name in DIVIDED}
    return outcomes, rows, mean, together_and_apart(rank), counts


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What each of two processes has of `on_rank`."""
    return of_two_processes(on_rank, tmp_path_factory.mktemp("shares"))


def close(result, expected):
    assert expected.isfinite().all()
    torch.testing.assert_close(result, expected, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", TERMS)
def test_losses_and_gradients_are_those_of_the_whole_batch(name, both):
    loss, weights, rows = outcome(TERMS[name])
    assert name == "no row" or loss > 0
    of_rows = []
    for outcomes, *_ in both:
        loss_there, weights_there, rows_there = outcomes[name]
        close(loss_there, loss)
        for gradient, expected in zip(weights_there, weights, strict=True):
            close(gradient, expected)
        of_rows.append(rows_there / 2)  # DDP would divide them so
    close(torch.cat(of_rows, dim=1), rows)


def test_each_row_is_computed_once_and_means_are_known_to_all(both):
    rows = [rows for _, rows, *_ in both]
    assert [row for part in rows for row in part] == list(range(7))
    assert {len(part) for part in rows} == {3, 4}
    for _, _, (several, one), *_ in both:
        torch.testing.assert_close(several, torch.tensor([0.5, 1.0]))
        torch.testing.assert_close(one, torch.tensor(0.5))


def test_what_is_gathered_together_is_what_is_gathered_apart_in_fewer_messages(both):
    for _, _, _, ((few, *together), (many, *apart)), _ in both:
        assert (few, many) == (3, 5)
        torch.testing.assert_close(together, apart)


def test_two_processes_have_half_of_the_products_each(both):
    for name in DIVIDED:
        alone = products(name)
        for *_, counts in both:
            assert counts[name] == pytest.approx(alone / 2, rel=0.01), name


GROUP = """
import gc, sys, weakref
import torch
import torch.distributed as dist
from nearkin.distributed import process_group

weights = torch.nn.Parameter(torch.ones(3))
with process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1):
    group = weakref.ref(dist.group.WORLD)
    weights.sum().backward()
    torch.optim.SGD([weights], lr=0.1).step()  # imports torch._dynamo, and with it much else
gc.collect()
sys.exit(group() is not None)
"""
"""What trains in an interpreter that has imported nothing else before."""


@pytest.mark.slow
def test_nothing_of_a_group_outlives_it(tmp_path):
    subprocess.run([sys.executable, "-c", GROUP, tmp_path / "group"], check=True)


def test_one_process_computes_what_it_is_asked_for():
    x = torch.ones(3, requires_grad=True)
    parts = []
    mean = mean_over_rows(lambda rows: parts.append(rows) or x.mean(), 3)
    assert parts == [slice(None)]
    assert mean_over_ranks(lambda _: x, 3) is x
    assert mean.grad_fn.name() == "MeanBackward0"
