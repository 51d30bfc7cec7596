"""Neighborhood contrast for new classes, from the paper: Zhong et al. 2021.

The terms of the loss are restated image by image, as the paper and the official code have them.
"""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare, kstest
from small import BATCH, SIDE, assert_same_gradient, double_for, run, small
from torch import nn

from nearkin.errors import UsageError
from nearkin.memory import EMPTY
from nearkin.methods.ncl import NCL
from nearkin.networks.branch import Backbone
from nearkin.types import UNLABELED, Batch

SEED = 7
TERMS = ["classify", "pairs", "consistency", "known", "novel"]


def ncl(**options):
    """After four steps: queues hold images of the next batch, and have empty places."""
    method = small("ncl", **options).double()
    run(method, "ncl", start=(4, None), until=8, total=10, batches=double_for)
    method.eval()
    batch = double_for("ncl")
    known = batch.label != UNLABELED
    for queue, rows in ((method.known_queue, known), (method.novel_queue, ~known)):
        assert 0 < queue.filled.sum() < 40
        assert torch.isin(batch.index[rows], queue.index).any()
    return method


def usable(queue, image):
    """Entries that show an image, and not this one."""
    return [j for j, entry in enumerate(queue.index) if entry not in (EMPTY, image)]


def same_class(method, h):
    if method.pseudo_labels == "ranks":
        sets = [set(row.topk(method.top_ranks).indices.tolist()) for row in h]
        return torch.tensor([[a == b for a in sets] for b in sets])
    alike = F.cosine_similarity(h[:, None], h[None], dim=2)
    if method.pseudo_labels == "closest":
        pairs = sorted(itertools.combinations(range(len(h)), 2), key=lambda pair: -alike[pair])
        same = torch.eye(len(h), dtype=torch.bool)
        for i, j in pairs[: round(method.positive_rate * len(pairs))]:
            same[i, j] = same[j, i] = True
        return same
    return alike > method.threshold


def class_target(queue, label, entries):
    positive = [1.0] + [float(queue.label[j] == label) for j in entries]
    return torch.tensor(positive) / sum(positive)


def neighborhood_target(method, logits):
    most = int(method.novel_queue.filled.sum()) // (2 * method.heads.novel.out_features)
    k, alpha = min(method.num_neighbors, most), method.own_weight
    target, official = torch.zeros_like(logits), method.targets == "official"
    nearest = logits.topk(k).indices if official else 1 + logits[1:].topk(k).indices
    target[nearest] = (1 - alpha) / k
    target[0] = alpha
    return target


def restated(method, batch, progress):
    known, t = batch.label != UNLABELED, method.temperature
    h1, h2 = (method.online(view) for view in batch.views)
    q, k = F.normalize(h1), F.normalize(h2).detach()
    contrast = {True: [], False: []}
    for i in range(BATCH):
        queue = method.known_queue if known[i] else method.novel_queue
        entries = usable(queue, int(batch.index[i]))
        logits = torch.cat([k[i, None], queue.keys[entries]]) @ q[i] / t
        if known[i]:
            target = class_target(queue, batch.label[i], entries)
        else:
            target = neighborhood_target(method, logits.detach())
        contrast[bool(known[i])].append(-(target * logits.log_softmax(0)).sum())
    novel, classes = (
        [head(h).softmax(1) for h in (h1, h2)] for head in (method.heads.novel, method.heads.known)
    )
    agreement = novel[0][~known] @ novel[1][~known].T
    same = same_class(method, h1[~known].detach())
    risen = min(progress / method.consistency_until, 1)
    weight = method.consistency_weight * math.exp(-5 * (1 - risen) ** 2)
    return {
        "classify": F.cross_entropy(method.heads.known(h1[known]), batch.label[known]),
        "pairs": -(torch.where(same, agreement, 1 - agreement) + 1e-7).log().mean(),
        "consistency": weight * (F.mse_loss(*classes) + F.mse_loss(*novel)),
        "known": method.known_weight * torch.stack(contrast[True]).mean(),
        "novel": method.novel_weight * torch.stack(contrast[False]).mean(),
    }, same


@pytest.mark.parametrize("targets", ["paper", "official"])
@pytest.mark.parametrize("pseudo_labels", ["close", "closest", "ranks"])
def test_the_loss_is_the_papers_term_by_term_and_so_is_its_gradient(targets, pseudo_labels):
    """Keys, queues and pseudo-labels are constants."""
    options = dict(targets=targets, pseudo_labels=pseudo_labels, threshold=0.5, top_ranks=1)
    options |= dict(positive_rate=0.3, num_hard=0, known_weight=0.3, novel_weight=0.7)
    method, batch = ncl(**options), double_for("ncl")
    result, (expected, same) = method(batch, 0.1), restated(method, batch, 0.1)
    share = result.metrics["positive_rate"].item()
    for name in TERMS:
        torch.testing.assert_close(result.metrics[name], expected[name].detach())
    pairs = len(same) * (len(same) - 1)
    assert share == pytest.approx((same.sum() - len(same)).item() / pairs)
    assert len(same) < same.sum() < same.numel()
    total = torch.stack(list(expected.values())).sum()
    assert_same_gradient(result.loss, total, method)


def test_neighbors_are_at_most_half_of_what_the_queue_holds_for_each_class():
    method, batch = ncl(num_neighbors=200, num_hard=0), double_for("ncl")
    expected, _ = restated(method, batch, 0.0)
    torch.testing.assert_close(method(batch, 0.0).metrics["novel"], expected["novel"].detach())


def reads(first, second, label):
    """Images whose features begin with these numbers, in either view."""
    views = torch.zeros(2, len(label), 3 * SIDE * SIDE, dtype=torch.float64)
    views[:, :, :2] = torch.tensor([first, second])
    views = tuple(views.view(2, -1, 3, SIDE, SIDE))
    return Batch(views, torch.arange(len(label)), torch.tensor(label))


def reader(**options):
    """One whose features are the numbers of the image. Each queue holds four."""
    sizes = dict(num_known_classes=2, num_novel_classes=1, queue_size=4, num_hard=0)
    settings = dict(own_weight=0.2, num_neighbors=2, known_weight=1.0, temperature=1.0)
    features = 3 * SIDE * SIDE
    return NCL(Backbone(nn.Flatten(), features), **sizes | settings | options).double()


def fill(queue, rows, label=None):
    queue.keys.zero_()
    queue.keys[: len(rows), :2] = torch.tensor(rows)
    queue.index[: len(rows)] = 100 + torch.arange(len(rows))
    if label is not None:
        queue.label[: len(label)] = torch.tensor(label)


def novel_loss(num_hard, temperature=1.0):
    """Of a query with one nearest key in the queue, one easy one and one known one."""
    options = dict(targets="official", num_neighbors=1, num_easy=1, num_mixes=1)
    method = reader(num_hard=num_hard, temperature=temperature, **options)
    fill(method.novel_queue, [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    fill(method.known_queue, [[0.8, -0.6]], label=[0])
    batch = reads([[1.0, 0.0]], [[0.8, 0.6]], label=[UNLABELED])
    return method(batch, 0.5).metrics["novel"].item()


def test_hard_negatives_give_the_golden_value():
    """Similarities of own key, queue and mixtures are all divided by the temperature."""
    for num_hard, expected in ((0, 1.1360308), (2, 1.3531898)):
        assert novel_loss(num_hard) == pytest.approx(expected, abs=1e-7), num_hard
    t, all_of_them = 0.3, [0.8, 1.0, 0.6, 0.0, -1.0, 5**-0.5, -2 * 5**-0.5]
    log_sum = math.log(sum(math.exp(s / t) for s in all_of_them))
    assert novel_loss(2, t) == pytest.approx(log_sum - (0.2 * 0.8 + 0.8 * 1.0) / t)


@pytest.mark.parametrize("num_known", [0, 1, BATCH - 1, BATCH])
@pytest.mark.parametrize("pseudo_labels", ["close", "closest", "ranks"])
def test_terms_of_images_that_are_not_there_are_zero(num_known, pseudo_labels):
    method = ncl(pseudo_labels=pseudo_labels).train()
    label = torch.where(torch.arange(BATCH) < num_known, torch.arange(BATCH) % 3, UNLABELED)
    step = method(replace(double_for("ncl"), label=label), 0.5)
    absent = {"classify", "known"} if num_known == 0 else set()
    absent |= {"pairs", "novel"} if num_known == BATCH else set()
    assert {name for name in TERMS if step.metrics[name] == 0} == absent
    step.loss.backward()
    values = [step.loss, *step.metrics.values(), *(p.grad for p in method.parameters())]
    assert all(value.isfinite().all() for value in values)
    method.commit(step.memo, 0.5)
    for queue in (method.known_queue, method.novel_queue):
        assert queue.keys.isfinite().all()


@pytest.mark.parametrize("other", ["ones own older entry", "what a queue started with"])
def test_what_does_not_count_is_neither_a_positive_nor_a_negative(other):
    """Whatever stands in its place, no bit changes, of the loss or of a gradient."""
    trained, batch, met = ncl(num_easy=40), double_for("ncl"), 0
    for image in range(BATCH):
        outcomes, one = [], batch.map(lambda x, image=image: x[[image]])
        for replaced in (False, True):
            method = copy.deepcopy(trained)
            for queue in (method.known_queue, method.novel_queue):
                entries = queue.index == (one.index if "own" in other else EMPTY)
                met += int(entries.sum())
                if replaced:
                    queue.keys[entries] = 24**-0.5
                    queue.label[entries[: len(queue.label)]] = batch.label[image]
            torch.manual_seed(SEED)
            loss = method(one, 0.5).loss
            outcomes.append([loss, *torch.autograd.grad(loss, list(method.parameters()))])
        assert all(torch.equal(a, b) for a, b in zip(*outcomes))
    assert met > 10


def test_queries_join_the_queue_of_their_kind_after_the_step():
    """First views, not second ones, in the order of the batch."""
    method, batch = small("ncl").double().eval(), double_for("ncl")
    step = method(batch, 0.5)
    assert not method.known_queue.filled.any()
    method.commit(step.memo, 0.5)
    query, known = F.normalize(method.online(batch.views[0])).detach(), batch.label != UNLABELED
    for queue, rows in ((method.known_queue, known), (method.novel_queue, ~known)):
        count = int(rows.sum())
        torch.testing.assert_close(queue.keys[:count], query[rows])
        assert queue.index[:count].tolist() == batch.index[rows].tolist()
        assert queue.filled.sum() == queue.cursor == count
    labels = batch.label[known].tolist()
    assert method.known_queue.label.tolist() == labels + [UNLABELED] * (40 - len(labels))


def test_hard_negatives_are_added_when_their_time_has_come_and_there_are_known_images():
    """And never lower the loss."""
    method, batch = ncl(hard_from=0.4, num_hard=7), double_for("ncl")
    before, after = (method(batch, progress).metrics["novel"] for progress in (0.39, 0.4))
    method.num_hard = 0
    assert method(batch, 0.4).metrics["novel"] == before < after
    method = small("ncl").double().eval()
    method.novel_queue.enqueue(F.normalize(torch.rand(40, 24).double()), torch.arange(100, 140))
    loss = method(batch, 0.5).metrics["novel"]
    method.num_hard = 0
    assert torch.equal(method(batch, 0.5).metrics["novel"], loss)


def test_the_contrast_of_novel_images_waits_for_the_end_of_the_first_epoch():
    method, batch = small("ncl", novel_from=0.1).double(), double_for("ncl")
    method.commit(method(double_for("ncl", 1), 0.0).memo, 0.0)
    assert method(batch, 0.09).metrics["novel"] == 0
    assert method(batch, 0.1).metrics["novel"] > 0


def test_hard_negatives_are_the_most_similar_mixtures_of_the_least_similar_keys():
    """Equations 9 to 11, with every known key alike, so that it does not matter which is drawn."""
    method, batch = ncl(num_easy=4, num_mixes=2, num_hard=7), double_for("ncl")
    known = F.normalize(torch.rand(1, 24).double())
    method.known_queue.keys[:] = known
    images = batch.label == UNLABELED
    query = F.normalize(method.online(batch.views[0])).detach()[images]
    queue = method.novel_queue
    entries = [usable(queue, int(i)) for i in batch.index[images]]
    mask = torch.tensor([[j in some for j in range(40)] for some in entries])
    negatives = method.hard_negatives(query, mask)
    for row, q, some in zip(negatives, query, entries):
        keys = queue.keys[some]
        easy = keys[(keys @ q).argsort()[:4]]
        mixed = F.normalize(torch.cat([easy + 2 * known, 2 * easy + known] * 2) / 3)
        torch.testing.assert_close(row, (mixed @ q).sort(descending=True).values[:7])


def test_each_easy_key_is_mixed_with_a_known_one_of_its_own():
    """Known keys are permuted. Keys at right angles say in a similarity who was mixed, and how."""
    method = reader(queue_size=8, num_easy=8, num_mixes=1, num_hard=1000)
    for queue, first in ((method.novel_queue, 0), (method.known_queue, 8)):
        queue.keys.copy_(torch.eye(192)[first : first + 8])
        queue.index.copy_(torch.arange(8))
    torch.manual_seed(SEED)
    query = torch.randn(1, 192, dtype=torch.float64)
    negatives = method.hard_negatives(query.repeat(300, 1), torch.ones(300, 8, dtype=torch.bool))
    toward = query[0, :16].tolist()
    mixed = {
        round((share * toward[e] + (3 - share) * toward[8 + k]) / 5**0.5, 9): (share, e, k)
        for share, e, k in itertools.product((1, 2), range(8), range(8))
    }
    partners = torch.zeros(8, 8)
    for row in negatives.tolist():
        drawn = [mixed[round(similarity, 9)] for similarity in row]
        once, twice = (sorted(d[1:] for d in drawn if d[0] == share) for share in (1, 2))
        assert once == twice
        assert [e for e, _ in once] == sorted(k for _, k in once) == list(range(8))
        for e, k in once:
            partners[e, k] += 1
    assert chisquare(partners.flatten()).pvalue > 0.001


def test_uniform_shares_are_uniform():
    """A query that is the novel key: its similarity to a mixture at right angles gives the share."""
    method = reader(queue_size=1, num_easy=1, num_mixes=4000, num_hard=4000, mix="uniform")
    for queue, first in ((method.novel_queue, 0), (method.known_queue, 1)):
        queue.keys.copy_(torch.eye(192)[first, None])
        queue.index.fill_(100)
    torch.manual_seed(SEED)
    negatives = method.hard_negatives(torch.eye(192)[:1].double(), torch.tensor([[True]]))
    ratio = negatives / (1 - negatives.square()).sqrt()
    assert kstest((ratio / (1 + ratio)).flatten(), "uniform").pvalue > 0.001


def test_more_top_ranks_than_features_are_refused():
    with pytest.raises(UsageError, match="top_ranks 25 is more than the 24 features"):
        small("ncl", pseudo_labels="ranks", top_ranks=25)
    assert small("ncl", top_ranks=25)  # which close pairs do not use
