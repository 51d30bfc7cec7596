"""UNO, from the paper: Fini et al. 2021. Targets and losses are restated image by image."""

from dataclasses import replace

import pytest
import torch
from restated import sinkhorn
from small import BATCH, SIDE, assert_same_gradient, batch_for, double_for, run, small

from nearkin.networks.heads import Prototypes
from nearkin.types import UNLABELED

KNOWN, NOVEL = 3, 3


def uno(**options):
    return small("uno", **options).double()


def codes(scores):
    return torch.tensor(sinkhorn(scores.tolist(), 0.05, 3), dtype=torch.float64)


def prototype_cosines(features, prototypes):
    return (features / features.norm(dim=1, keepdim=True)) @ prototypes.weight.T


def restated(method, batch):
    """The loss of each head: of the novel classes, then of the overclustering."""
    features = [method.online(view) for view in batch.views]
    losses = []
    for head in (*method.heads.novel, *method.more_classes):
        known = [prototype_cosines(h, method.heads.known) for h in features]
        novel = [prototype_cosines(head.projector(h), head.prototypes) for h in features]
        cosines = [torch.cat(pair, 1) for pair in zip(known, novel, strict=True)]
        unknown = [i for i in range(BATCH) if batch.label[i] == UNLABELED]
        total = 0.0
        for own, other in ((0, 1), (1, 0)):
            code = codes(cosines[own][unknown][:, KNOWN:])
            log_p = torch.log_softmax(cosines[other] / 0.1, dim=1)
            for i in range(BATCH):
                if i in unknown:
                    target = torch.zeros(log_p.shape[1], dtype=torch.double)
                    target[KNOWN:] = code[unknown.index(i)]
                    total = total - (target * log_p[i]).sum()
                else:
                    total = total - log_p[i, batch.label[i]]
        losses.append(total / (2 * BATCH))
    return losses


def test_uno_is_the_papers_loss_and_so_is_its_gradient():
    method, batch = uno().train(), double_for("uno")
    step, expected = method(batch, 0.3), restated(method, batch)
    assert len(expected) == 4  # two heads, and two of thrice the classes
    total = sum(expected) / 4
    torch.testing.assert_close(step.memo, torch.stack(expected[:2]).detach())
    assert_same_gradient(step.loss, total, method)


@pytest.mark.parametrize("kind", ["labeled", "unlabeled"])
def test_a_batch_may_hold_images_of_one_kind_only(kind):
    label = torch.arange(BATCH) % KNOWN
    label = label if kind == "labeled" else torch.full_like(label, UNLABELED)
    method = uno()
    step = method(replace(double_for("uno"), label=label), 0.5)
    assert step.loss.isfinite()
    step.loss.backward()
    gradients = [p.grad for p in method.parameters() if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_commit_returns_prototypes_to_length_one_and_forward_does_not():
    method, batch = uno(), double_for("uno")
    with torch.no_grad():
        for part in method.modules():
            if isinstance(part, Prototypes):
                part.weight.mul_(3.0)
    step = method(batch, 0.5)
    assert method.heads.known.weight.norm(dim=1).sub(3).abs().max() < 1e-6  # unit in float32
    method.commit(step.memo, 0.5)
    lengths = [p.weight.norm(dim=1) for p in method.modules() if isinstance(p, Prototypes)]
    assert len(lengths) == 5
    torch.testing.assert_close(torch.cat(lengths), torch.ones(3 + 2 * 3 + 2 * 9).double())


def test_the_head_with_the_least_average_loss_is_used():
    method, features = uno().eval(), torch.rand(5, 24).double()
    for losses, best in (([2.0, 1.0], 1), ([1.0, 3.0], 0)):
        for _ in range(500):
            method.commit(torch.tensor(losses).double(), 0.5)
        expected = torch.cat([method.heads.known(features), method.heads.novel[best](features)], 1)
        torch.testing.assert_close(method.heads(features), expected / 0.1)
    torch.testing.assert_close(
        method.heads.losses, torch.tensor([1.0, 3.0]).double(), atol=0.05, rtol=0
    )


def test_it_sorts_images_into_known_and_novel_classes():
    """Images of index i are of class i mod 6, near its mean image; the first three are known."""

    def grouped(step):
        batch = batch_for("uno", step)
        means = torch.randn(6, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
        views = tuple(means[batch.index % 6] + 0.3 * view for view in batch.views)
        return replace(batch, views=views)

    method, batch = small("uno"), grouped(500)
    run(method, "uno", total=60, until=60, batches=lambda _, step: grouped(step))
    with torch.no_grad():
        predicted = method.eval().heads(method.backbone(batch.views[0])).argmax(1)
    truth, known = batch.index % 6, batch.index % 6 < KNOWN
    assert (predicted == truth)[known].float().mean() > 0.9
    assert (predicted >= KNOWN)[~known].float().mean() > 0.9


def test_cosines_keep_their_digits_under_autocast():
    """They are divided by a small temperature, and by a smaller epsilon."""
    prototypes, x = Prototypes(16, 5), torch.randn(8, 16)
    expected = prototypes(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(prototypes(x), expected)
