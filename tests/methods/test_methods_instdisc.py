"""Instance discrimination, from the paper: Wu et al. 2018. Equation numbers are its own."""

import pytest
import restated
import torch
import torch.nn.functional as F
from restated import lists
from small import NUM_IMAGES, SIDE, assert_same_gradient, double_at, small
from torch import nn

from nearkin.methods.instdisc import InstDisc
from nearkin.networks.branch import Backbone
from nearkin.objectives import unit
from nearkin.types import UNLABELED, Batch

SEED = 7


def forward(method, batch, progress=0.5):
    """With what a method draws pinned down."""
    torch.manual_seed(SEED)
    return method(batch, progress)


def drawn(method):
    """The noise that `forward` draws."""
    torch.manual_seed(SEED)
    return method.bank.keys[method.bank.sample(method.num_noise)]


def embeddings(method, batch):
    return unit(method.online(batch.views[0])).detach()


def reader(dim, **options):
    """One whose embedding is the first numbers of an image, scaled to length one."""
    features = 3 * SIDE * SIDE
    method = InstDisc(Backbone(nn.Flatten(), features), dim=dim, **options).double()
    with torch.no_grad():
        method.online.projector[0].weight.copy_(torch.eye(dim, features))
        method.online.projector[0].bias.zero_()
    return method


def reads(*rows, index):
    """Images that begin with these numbers."""
    images = torch.zeros(len(rows), 3 * SIDE * SIDE, dtype=torch.float64)
    images[:, : len(rows[0])] = torch.tensor(rows)
    views = (images.view(-1, 3, SIDE, SIDE).requires_grad_(),)
    return Batch(views, torch.tensor(index), torch.full((len(rows),), UNLABELED))


def test_softmax_is_the_cross_entropy_over_the_bank_as_it_was_before_the_step():
    method = small("instdisc", loss="softmax").double().eval()
    for step in range(4):
        batch, rows = double_at(step, 1), method.bank.keys.clone()
        result = method(batch, 0.5)
        expected = F.cross_entropy(embeddings(method, batch) @ rows.T / 0.07, batch.index)
        torch.testing.assert_close(result.loss.detach(), expected)
        method.commit(result.memo, 0.5)
        assert not torch.equal(method.bank.keys, rows)


def test_the_parametric_baseline_is_the_cross_entropy_of_a_linear_layer():
    """Equation 1, with weights of any length."""
    method = small("instdisc_parametric", temperature=0.3).double().eval()
    with torch.no_grad():
        method.weights.mul_(1 + torch.rand(NUM_IMAGES, 1))
    batch = double_at(0, 1)
    v = unit(method.online(batch.views[0]))
    expected = F.cross_entropy(v @ method.weights.T / 0.3, batch.index)
    assert_same_gradient(method(batch, 0.5).loss, expected, method)


def test_nce_asks_of_the_own_row_and_of_each_noise_row_whether_it_is_the_images_own():
    method, batch = small("instdisc", temperature=0.2).double().eval(), double_at(0, 1)
    method.normalizer.fill_(90.0)
    loss = forward(method, batch).loss.item()
    rows = embeddings(method, batch), method.bank.keys[batch.index], drawn(method)
    assert loss == pytest.approx(restated.nce(*lists(rows), 0.2, 90.0, NUM_IMAGES), rel=1e-12)


def test_the_normalizer_is_that_of_the_first_batch_and_its_noise_and_stays():
    """Equation 8: the mean over both, times the images."""
    method, batch = small("instdisc").double().eval(), double_at(0, 1)
    v = embeddings(method, batch)
    expected = (v @ drawn(method).T / 0.07).exp().mean() * NUM_IMAGES
    assert method.normalizer == 0
    step = forward(method, batch)
    assert method.normalizer == 0  # forward writes nothing
    method.commit(step.memo, 0.5)
    torch.testing.assert_close(method.normalizer, expected)
    once = method.normalizer.clone()  # estimated once, and used from then on
    for step in range(1, 5):
        method.commit(method(double_at(step, 1), 0.5).memo, 0.5)
        assert torch.equal(method.normalizer, once)
    before = forward(method, double_at(5, 1)).loss
    method.normalizer.mul_(2)  # were it estimated again, this would change nothing
    assert forward(method, double_at(5, 1)).loss != before


def test_a_visit_moves_the_row_as_worked_out_by_hand_and_no_other():
    for momentum, moved in (
        (0.5, (0.8944271910, 0.4472135955)),
        (0.0, (0.6, 0.8)),
        (1.0, (1.0, 0.0)),
    ):
        method = reader(2, num_images=6, num_noise=4, momentum=momentum)
        method.bank.keys[4] = torch.tensor([1.0, 0.0])
        before, others = method.bank.keys.clone(), [0, 1, 2, 3, 5]
        method.commit(method(reads((0.6, 0.8), index=[4]), 0.5).memo, 0.5)
        torch.testing.assert_close(method.bank.keys[4], torch.tensor(moved).double())
        assert torch.equal(method.bank.keys[others], before[others])


def proximal(rows, bank, **options):
    """The loss of images that read these rows, and its gradient there; rows of the bank given."""
    method = reader(len(bank[0]), num_images=len(bank), num_noise=4, **options)
    method.bank.keys.copy_(torch.tensor(bank))
    batch = reads(*rows, index=list(range(len(rows))))
    loss = forward(method, batch).loss
    (gradient,) = torch.autograd.grad(loss, batch.views)
    return loss, gradient.flatten(1)[:, : len(bank[0])]


def test_the_proximal_term_is_the_squared_distance_to_the_row_and_pulls_along_it():
    """Equation 9. Its gradient is 2 lambda (v - v_old), less what would change v's length."""
    torch.manual_seed(0)
    v, old = unit(torch.randn(2, 3, 4, dtype=torch.float64))
    without, gradient_without = proximal(v.tolist(), old.tolist())
    within, gradient_within = proximal(v.tolist(), old.tolist(), proximal_weight=0.7)
    distance = (v - old).square().sum(dim=1)
    torch.testing.assert_close(within - without, 0.7 * distance.mean())
    pull = 2 * 0.7 * (v - old)
    along = pull - (pull * v).sum(dim=1, keepdim=True) * v
    torch.testing.assert_close(gradient_within - gradient_without, along / 3)
