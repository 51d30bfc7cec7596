"""LARS against timm and worked examples, and the groups that learning rates belong to."""

import copy
import math
from dataclasses import replace
from functools import partial
from typing import get_args, get_type_hints

import numpy as np
import pytest
import timm.optim.muon
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from small import Observed, batch_for, run, small
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, MultiStepLR

from nearkin.config import TrainConfig
from nearkin.distributed import native_precision
from nearkin.errors import UsageError
from nearkin.method import Method, half_cosine
from nearkin.networks.branch import Backbone, Branch, frozen_copy, mlp
from nearkin.training.fit import schedule_for
from nearkin.training.loop import clip_gradients, gradients, steps, total_norm
from nearkin.training.muon import Muon, is_matrix, orthogonal
from nearkin.training.optimizer import (
    LARS,
    build_optimizer,
    main_rate,
    set_learning_rates,
    warmup_cosine,
    warmup_milestones,
)
from nearkin.types import Step


class Siamese(Method[None]):
    """A method with a frozen copy and a predictor that has its own learning rate."""

    def __init__(self, rates=("predictor",)):
        super().__init__()
        body = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8))
        self.online = Branch(Backbone(body, 8), 6, 4)
        self.target = frozen_copy(self.online)
        self.predictor = mlp(4, 4)
        self.predictors = mlp(4, 2)  # shares the beginning of its name, not the rate
        self.rates = rates

    def encode(self, batch):
        return [self.predictor(self.online(batch.views[0]))]

    def compute_loss(self, encoded, batch, progress):  # noqa: ARG002
        return Step(encoded[0].mean() * (1 - progress), memo=None)

    def learning_rates(self, schedule, /):
        return dict.fromkeys(self.rates, lambda progress: schedule(0.0 * progress))


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)
    ).double()


def train(model, optimizer, steps, lr):
    """Learn which of three numbers of an image is the largest."""
    for step in steps:
        x = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(step)).double()
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, 0, 0, :3].argmax(1)).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def cosine(step):
    return 0.3 * math.cos(step / 20)


def timms(model, *, weight_decay, clip, eta, vectors):
    """timm adapts and decays whatever it is given, as apex's LARC does, which SwAV trains with.

    It has no rule for vectors: a group without decay or adaptation is that rule.
    """
    groups = [
        dict(
            params=[p for p in model.parameters() if (p.ndim > 1) is layers],
            weight_decay=weight_decay if layers or vectors else 0.0,
            always_adapt=layers or vectors,
        )
        for layers in (True, False)
    ]
    return timm.optim.Lars(groups, lr=0.3, momentum=0.9, trust_coeff=eta, trust_clip=clip)


TIMMS = [(False, 1e-3, False), (True, 0.02, False), (True, 50.0, False), (False, 0.02, True)]


@pytest.mark.parametrize(("clip", "eta", "vectors"), [*TIMMS, (True, 0.02, True)])
def test_lars_walks_the_same_way_as_timms(clip, eta, vectors):
    # A bias before a norm has rounding for a gradient: adapted without decay, it would be all.
    for weight_decay in (0.1,) if vectors else (0.0, 1e-4, 0.1):
        ours, theirs = net(), net()
        start = nn.utils.parameters_to_vector(ours.parameters()).detach()
        options = dict(weight_decay=weight_decay, clip=clip, eta=eta, vectors=vectors)
        walked = train(ours, LARS(ours.parameters(), 0.3, **options), range(30), cosine)
        expected = train(theirs, timms(theirs, **options), range(30), cosine)
        assert vectors or (walked - start).norm() > 1
        torch.testing.assert_close(walked, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-4, 0.1])
def test_joint_lars_is_that_of_simclr_with_the_rate_inside_and_of_byol_with_it_outside(
    inside, weight_decay
):
    """Both divide by |g + weight_decay w|; biases and norms are neither decayed nor adapted."""
    ours, theirs = net(), net()
    velocities = [torch.zeros_like(p) for p in theirs.parameters()]
    optimizer = LARS(ours.parameters(), 0.3, weight_decay=weight_decay, joint=True, inside=inside)
    walked = train(ours, optimizer, range(30), cosine)

    class Restated(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            lr = self.param_groups[0]["lr"]
            for p, v in zip(theirs.parameters(), velocities, strict=True):
                update = p.grad
                if p.ndim > 1:
                    update = p.grad + weight_decay * p
                    update = update * 1e-3 * p.norm() / update.norm()
                v.mul_(0.9).add_(lr * update if inside else update)
                p.sub_(v if inside else lr * v)

    expected = train(theirs, Restated(theirs.parameters(), 0.3), range(30), cosine)
    torch.testing.assert_close(walked, expected, rtol=1e-5, atol=1e-9)


def one_step(weights, gradient, **options):
    parameter = nn.Parameter(torch.tensor(weights, dtype=torch.float64))
    parameter.grad = torch.tensor(gradient, dtype=torch.float64)
    LARS([parameter], **options).step()
    return parameter.detach()


WEIGHTS, GRADIENT, ZEROS = [[3.0, 4.0]], [[0.6, 0.8]], [[0.0, 0.0]]
ACROSS = [[4.0, -3.0]]
"""A gradient as long as the weights, and at right angles to them."""
ONCE = dict(lr=1.0, weight_decay=0.1, momentum=0.0)
EQUAL = dict(lr=1.0, weight_decay=1.0, momentum=0.0, eta=1.0)
PLAIN = dict(lr=0.5, weight_decay=0.1)
WORKED = [
    # The ratio is .001 x 5 / 1.5 and the decayed gradient (.9, 1.2).
    (WEIGHTS, GRADIENT, ONCE, [[2.997, 3.996]]),
    (WEIGHTS[0], GRADIENT[0], ONCE | dict(vectors=True), [2.997, 3.996]),
    # Vectors take the step of plain gradient descent unless told otherwise.
    (WEIGHTS[0], GRADIENT[0], PLAIN, [2.7, 3.6]),
    # Clipped, the ratio .02 x 5 / 1.5 = 1/15 becomes 1/15 / .4 = 1/6, and never more than 1.
    (WEIGHTS, GRADIENT, ONCE | dict(lr=0.4, eta=0.02, clip=True), [[2.94, 3.92]]),
    (WEIGHTS, GRADIENT, dict(lr=0.5, eta=100.0, clip=True), [[2.7, 3.6]]),
    # |w| = |g| = 5 at weight decay 1: eta 5 / 10, and jointly eta 5 / |(7, 1)|.
    (WEIGHTS, ACROSS, EQUAL, [[3 - 3.5, 4 - 0.5]]),
    (WEIGHTS, ACROSS, EQUAL | dict(joint=True), [[3 - 7 * 0.5**0.5, 4 - 0.5**0.5]]),
    # Weights of zero are free to move, and a rate and a gradient of zero are survived.
    (ZEROS, GRADIENT, PLAIN, [[-0.3, -0.4]]),
    (ZEROS, GRADIENT, PLAIN | dict(clip=True), [[-0.3, -0.4]]),
    (WEIGHTS, ZEROS, dict(lr=0.0), WEIGHTS),
    (WEIGHTS, ZEROS, dict(lr=0.0, clip=True), WEIGHTS),
]


def test_lars_takes_the_steps_worked_out_by_hand():
    for weights, gradient, options, expected in WORKED:
        stepped = one_step(weights, gradient, **options).tolist()
        np.testing.assert_allclose(stepped, expected, rtol=1e-7, err_msg=str(options))


def test_lars_remembers_its_velocity_in_its_state():
    straight, resumed = net(), net()
    expected = train(straight, LARS(straight.parameters(), 0.3), range(6), cosine)
    first, second = (LARS(resumed.parameters(), 0.3) for _ in range(2))
    train(resumed, first, range(3), cosine)
    second.load_state_dict(first.state_dict())
    assert torch.equal(train(resumed, second, range(3, 6), cosine), expected)


def test_lars_leaves_gradients_as_they_are_and_what_has_none():
    for clip in (False, True):
        model, left = net(), nn.Parameter(torch.ones(2, 2))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        LARS([*model.parameters(), left], 0.3, weight_decay=0.1, clip=clip).step()
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
        assert torch.equal(left, torch.ones(2, 2))


def trained(method):
    """What requires gradients, by name."""
    return {name: p for name, p in method.named_parameters() if p.requires_grad}


def names_of(method, params):
    names = {id(p): name for name, p in method.named_parameters()}
    return {names[id(p)] for p in params}


@pytest.mark.parametrize("name", ["sgd", "lars", "adamw", "muon"])
def test_what_requires_gradients_is_held_once_with_the_learning_rate_of_its_prefix(name):
    method = Siamese()
    optimizer = build_optimizer(method, name=name, lr=0.4, weight_decay=0.01)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held})
    assert names_of(method, held) == trained(method).keys()
    set_learning_rates(optimizer, method, warmup_cosine(), progress=0.5)
    groups = [(group["lr"], names_of(method, group["params"])) for group in optimizer.param_groups]
    rates = {n: rate for rate, names in groups for n in names}
    assert rates == {n: pytest.approx(0.4 if n.startswith("predictor.") else 0.2) for n in rates}
    assert main_rate(optimizer) == pytest.approx(0.2)  # which metrics.csv has


def test_the_most_specific_prefix_wins_and_one_that_names_nothing_is_refused():
    method = Siamese(rates=("online", "online.projector"))
    groups = build_optimizer(method, name="sgd", lr=0.1, weight_decay=0.0).param_groups
    held = {group["name"]: names_of(method, group["params"]) for group in groups}
    assert all(n.startswith("online.projector.") for n in held["online.projector"])
    assert all(n.startswith("online.backbone.") for n in held["online"])
    assert all(n.startswith("predictor") for n in held[""])
    with pytest.raises(UsageError, match=r"Siamese.learning_rates names 'predictr'"):
        build_optimizer(Siamese(rates=("predictr",)), name="sgd", lr=0.1, weight_decay=0.0)


def decayed(name, **options):
    """Parameters that shrink in a step without any gradient."""
    method = Siamese()
    for p in method.parameters():
        nn.init.ones_(p)
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    build_optimizer(method, name=name, lr=0.1, weight_decay=0.1, **options).step()
    return {n for n, p in method.named_parameters() if (p < 1).any()}


def test_biases_and_norms_are_not_decayed_but_by_sgd_or_where_lars_is_told_so():
    everything = trained(Siamese())
    for name in ("lars", "adamw", "muon"):
        assert decayed(name) == {n for n, p in everything.items() if p.ndim > 1}, name
    assert decayed("sgd") == decayed("lars", lars_form="swav") == everything.keys()


def test_the_form_of_lars_is_that_of_the_paper_or_of_a_code():
    def form(name):
        optimizer = build_optimizer(
            Siamese(), name="lars", lr=0.1, weight_decay=0.0, lars_form=name
        )
        (group, *_) = optimizer.param_groups
        return {key for key in ("clip", "vectors", "joint", "inside") if group[key]}, group["eta"]

    assert {name: form(name) for name in get_args(get_type_hints(TrainConfig)["lars_form"])} == {
        "you": (set(), 1e-3),
        "simclr": ({"joint", "inside"}, 1e-3),
        "byol": ({"joint"}, 1e-3),
        "swav": ({"vectors"}, 1e-3),
        "solo-learn": ({"clip"}, 0.02),
    }


POLYNOMIALS = np.array([
    [4.0848, -6.8946, 2.9270], [3.9505, -6.3029, 2.6377], [3.7418, -5.5913, 2.3037],
    [2.8769, -3.1427, 1.2046], [2.8366, -3.0525, 1.2012],
])  # fmt: skip
"""Odd ones, which bring singular values near 1 (leloykun.github.io/ponder/muon-opt-coeffs)."""


def quintic(matrix):
    """Five steps of Newton and Schulz, each by another polynomial of degree five."""
    x = matrix.double() / matrix.double().norm()
    for a, b, c in POLYNOMIALS:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.float()


SHAPES = [(24, 40), (40, 24), (16, 6, 3, 3), (24, 40), (70, 8, 3, 3), (64, 64), (5, 9)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_many_matrices_together_become_what_timm_makes_of_each_alone(dtype, near, padded):
    """Whatever their sizes and layouts in memory; in bfloat16, whose last digit is .4 %."""
    tensors = [torch.randn(shape) for shape in SHAPES]
    tensors[2] = tensors[2].to(memory_format=torch.channels_last)
    quintics = timm.optim.muon._COEFFICIENTS["quintic"]
    results = orthogonal(tensors, dtype, padded=padded)
    for x, result in zip(tensors, results, strict=True):
        flat = timm.optim.muon.zeropower_via_newtonschulz(x.flatten(1), 5, quintics, dtype=dtype)
        expected = flat.unflatten(1, x.shape[1:])
        assert result.dtype == dtype
        assert (result.float() - expected.float()).norm() < near * expected.float().norm()


def test_muon_takes_as_matrices_what_timm_does():
    shapes = [
        (8,),
        (8, 1),
        (1, 8, 8),
        (8, 1, 3, 3),
        (8, 2, 3, 3),
        (3, 3, 3, 3),
        (4, 512),
        (4, 516),
    ]
    expected = [timm.optim.muon._is_suitable_for_muon(torch.empty(s)) for s in shapes]
    assert [is_matrix(torch.empty(s)) for s in shapes] == expected
    assert 0 < sum(expected) < len(shapes)


def test_muon_moves_along_the_nearest_orthogonal_matrix_and_vectors_as_nadamw():
    """Its steps have singular values near 1, times .2 sqrt(longer side): as long as AdamW's."""
    native = native_precision(torch.device("cpu"))
    near = 1e-3 if native == torch.float32 else 3e-2
    method = Siamese()
    optimizer = build_optimizer(method, name="muon", lr=0.1, weight_decay=0.3)
    names = trained(method)
    vectors = {name: p.detach().clone() for name, p in names.items() if p.ndim == 1}
    nadamw = timm.optim.NAdamW(vectors.values(), lr=0.1, betas=(0.9, 0.999), weight_decay=0.0)
    velocity = {name: torch.zeros_like(p) for name, p in names.items()}
    for _ in range(3):
        before = {name: p.detach().clone() for name, p in names.items()}
        for name, p in names.items():
            p.grad = torch.randn_like(p)
            velocity[name] = 0.95 * velocity[name] + 0.05 * p.grad
        for name, p in vectors.items():
            p.grad = names[name].grad.clone()
        optimizer.step()
        nadamw.step()
        for name, p in names.items():
            if p.ndim == 1:
                torch.testing.assert_close(p.detach(), vectors[name], rtol=1e-4, atol=1e-5)
            if p.ndim == 1 or min(p.shape) < 4:
                continue
            looked_ahead = 0.95 * velocity[name] + 0.05 * p.grad
            u, _, v = torch.linalg.svd(looked_ahead, False)
            moved = (before[name] * (1 - 0.1 * 0.3) - p) / (0.1 * 0.2 * max(p.shape) ** 0.5)
            assert torch.linalg.svdvals(moved).sub(0.95).abs().max() < 0.4
            assert F.cosine_similarity(moved.flatten(), (u @ v).flatten(), dim=0) > 0.97
            torch.testing.assert_close(moved, quintic(looked_ahead), rtol=near, atol=near)


def test_muon_multiplies_in_the_precision_that_the_device_has():
    products = set()

    def note(operation, args, options, result):
        if operation.overloadpacket is torch.ops.aten.baddbmm:
            products.add(result.dtype)

    weight = nn.Parameter(torch.randn(8, 16))
    weight.grad = torch.randn(8, 16)
    with Observed(note):
        Muon([weight], 0.1).step()
    assert products == {native_precision(torch.device("cpu"))}


def test_learning_rates_are_plain_numbers_even_from_a_numpy_schedule():
    method = Siamese()
    optimizer = build_optimizer(method, name="adamw", lr=0.1, weight_decay=0.0)
    set_learning_rates(optimizer, method, np.cos, progress=0.25)
    assert {type(group["lr"]) for group in optimizer.param_groups} == {float}


def assert_same_rates(schedule, scheduler, total=20, **options):
    """Compare with a scheduler of torch's, which is asked after every step."""
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = scheduler(sgd, **options)
    for step in range(total + 1):
        assert schedule(step / total) == pytest.approx(sgd.param_groups[0]["lr"], abs=1e-12)
        sgd.step()
        theirs.step()


def test_a_cosine_a_warmup_and_drops_are_torchs():
    for final in (0.0, 0.1):
        cosine = warmup_cosine(final=final)
        assert (cosine(0.0), cosine(1.0)) == (1.0, pytest.approx(final, abs=1e-15))
        assert_same_rates(cosine, CosineAnnealingLR, T_max=20, eta_min=final)
    for schedule in (warmup_cosine, partial(warmup_milestones, [0.9])):
        risen = schedule(warmup=0.5, start=0.25)
        rising = lambda progress, risen=risen: risen(progress / 2)
        assert_same_rates(rising, LinearLR, total=10, start_factor=0.25, total_iters=10)
    drops = warmup_milestones([0.6, 0.8])
    assert_same_rates(drops, MultiStepLR, milestones=[12, 16], gamma=0.1)


@pytest.mark.parametrize("milestones", [(), (0.9,)])
def test_a_warmup_shorter_than_a_step_is_left_out(milestones):
    """At a rate of zero, a training of one step had learned nothing."""
    config = TrainConfig(
        encoder="e", epochs=2, freeze_epochs=0, warmup=0.1, lr_milestones=milestones
    )
    first = {total: schedule_for(config, total)(0.0) for total in (1, 9, 10, 20)}
    assert first == {1: 1.0, 9: 1.0, 10: 0.0, 20: 0.0}
    frozen = replace(config, freeze_epochs=1)  # of 18 steps, the backbone learns in 9
    assert schedule_for(frozen, 18)(0.0) == 1.0
    assert schedule_for(frozen, 20)(0.0) == 0.0


def decays(start):
    """The weight decays of matrices and of vectors, in each of the steps from a start to four."""
    method, seen = small("simclr"), []
    optimizer = build_optimizer(method, name="adamw", lr=0.1, weight_decay=0.04)
    method.backbone.register_forward_hook(
        lambda *_: seen.append([group["weight_decay"] for group in optimizer.param_groups])
    )
    batches = [batch_for("simclr", step) for step in range(start, 4)]
    options = dict(schedule=warmup_cosine(), weight_decay=half_cosine(0.04, 0.4))
    for _ in steps(method, optimizer, batches, start=start, total=4, seed=0, **options):
        pass
    return seen


def test_weight_decay_goes_along_a_cosine_of_the_step_and_what_has_none_gets_none():
    """As in DINO's code: last + (first - last) (1 + cos(pi step / total)) / 2."""
    falls = [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    expected = [[pytest.approx(0.4 - 0.36 * fall), 0.0] for fall in falls]
    assert decays(0) == expected
    assert decays(2) == expected[2:]


def test_a_step_that_is_prepared_is_the_same_and_nothing_is_written_before():
    whole, parted = (small("simclr") for _ in range(2))
    optimizers = [
        build_optimizer(m, name="muon", lr=0.1, weight_decay=0.1) for m in (whole, parted)
    ]
    for step in range(3):
        for method, optimizer in zip((whole, parted), optimizers, strict=True):
            optimizer.zero_grad()
            method(batch_for("simclr", step), 0.5).loss.backward()
        before = copy.deepcopy((parted.state_dict(), optimizers[1].state_dict()["state"]))
        optimizers[1].prepare()
        optimizers[1].prepare()  # such as after a step that diverged
        assert copy.deepcopy(optimizers[0]).step() is None  # a copy has prepared nothing
        torch.testing.assert_close(parted.state_dict(), before[0], rtol=0, atol=0)
        if step:
            torch.testing.assert_close(
                optimizers[1].state_dict()["state"], before[1], rtol=0, atol=0
            )
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(parted.state_dict(), whole.state_dict(), rtol=0, atol=0)


@given(limit=st.floats(0.01, 10))
def test_gradients_are_clipped_by_their_norm_together_as_torch_does(limit):
    ours, theirs = Siamese(), Siamese()
    for p, other in zip(trained(ours).values(), trained(theirs).values(), strict=True):
        p.grad = torch.randn_like(p)
        other.grad = p.grad.clone()
    clip_gradients(ours, total_norm(ours, gradients(ours).values()), limit)
    nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    torch.testing.assert_close(gradients(ours), gradients(theirs))


def test_a_step_is_that_of_clipped_gradients():
    """Of plain SGD, so that the step shows the gradient: as long as the limit, if it was longer."""
    for limit, expected in ((0.0, None), (1e9, None), (0.01, 0.01)):
        method = small("simclr")
        before = nn.utils.parameters_to_vector(method.parameters()).detach()
        optimizer = torch.optim.SGD([dict(params=[*method.parameters()], peak_lr=1.0, name="")])
        batches, options = (
            [batch_for("simclr", 0)],
            dict(schedule=half_cosine(1.0, 1.0), clip_norm=limit),
        )
        next(steps(method, optimizer, batches, start=0, total=1, seed=0, **options))
        moved = (nn.utils.parameters_to_vector(method.parameters()).detach() - before).norm()
        whole = total_norm(method, gradients(method).values())
        assert moved == pytest.approx(expected or whole.item(), rel=1e-3)
        assert (moved > 0.02) == (expected is None)


def test_what_is_frozen_takes_no_part_in_the_norm_of_what_is_clipped():
    """SwAV's prototypes have gradients of their own at first."""
    method = small("swav", freeze_until=0.5)
    before = nn.utils.parameters_to_vector(method.parameters()).detach()
    optimizer = build_optimizer(method, name="sgd", lr=1.0, weight_decay=0.0)
    batches, options = [batch_for("swav", 0)], dict(schedule=half_cosine(1.0, 1.0), clip_norm=0.01)
    next(steps(method, optimizer, batches, start=0, total=1, seed=0, **options))
    moved = nn.utils.parameters_to_vector(method.parameters()).detach() - before
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


@given(steps_per_epoch=st.integers(1, 10_000))
def test_a_rate_drops_with_the_first_step_of_an_epoch(steps_per_epoch):
    """120 and 160 epochs of 200 are 0.6 and 0.8, without rounding."""
    schedule, total = warmup_milestones([0.6, 0.8]), 200 * steps_per_epoch
    for epoch, after in ((120, 0.1), (160, 0.01)):
        step = epoch * steps_per_epoch
        assert schedule((step - 1) / total) == pytest.approx(10 * after)
        assert schedule(step / total) == pytest.approx(after)


def test_what_is_frozen_gathers_no_momentum():
    """SwAV's prototypes have a learning rate of zero at first, and gradients all the same."""
    method = small("swav", freeze_until=0.5)
    _, optimizer = run(method, "swav", until=3)
    assert not optimizer.state.get(method.prototypes)
    run(method, "swav", start=(3, optimizer))
    assert optimizer.state[method.prototypes]["momentum_buffer"].norm() > 0
