"""Nearest-neighbor contrast, from the paper: Dwibedi et al. 2021."""

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare
from small import BATCH, NUM_IMAGES, assert_same_gradient, batch_at, double_at, run, small

from nearkin.errors import UsageError
from nearkin.objectives import fused, unit

SEED = 7


def nnclr(**options):
    return small("nnclr", **dict(num_neighbors=1) | options).double().eval()


def embeddings(method, batch):
    return [unit(method.online(view)) for view in batch.views]


def predictions(method, batch):
    return [unit(method.predictor(method.online(view))) for view in batch.views]


def along(matrix):
    """The cross-entropy of the diagonal along the rows."""
    return F.cross_entropy(matrix, torch.arange(len(matrix)))


def restated(neighbors, predicted, form, temperature=0.1):
    """Both views ask, as in the code; or one, along rows and columns, as in the text."""
    first = unit(neighbors[0]) @ unit(predicted[1]).T / temperature
    second = unit(neighbors[1]) @ unit(predicted[0]).T / temperature
    return {
        "views": (along(first) + along(second)) / 2,
        "rowcol": (along(first) + along(first.T)) / 2,
        "both": (along(first) + along(first.T) + along(second) + along(second.T)) / 4,
    }[form]


def closest(method, batch):
    """For each view, the rows of the support set at the least distance."""
    support, neighbors = method.support_set, []
    for z in embeddings(method, batch):
        distance = torch.cdist(z.detach(), support.keys)
        distance[batch.index[:, None] == support.index] = torch.inf
        neighbors.append(support.keys[distance.argmin(dim=1)])
    return neighbors


@pytest.mark.parametrize("form", ["views", "rowcol", "both"])
def test_neighbors_must_find_the_other_views_prediction(form):
    """And gradients reach predictions only."""
    method, batch = nnclr(symmetric=form), double_at(0)
    run(method, "nnclr", until=3, batches=lambda _, step: double_at(step + 1))
    assert torch.isin(batch.index, method.support_set.index).any()
    loss = method.eval()(batch, 0.5).loss
    expected = restated(closest(method, batch), predictions(method, batch), form)
    assert_same_gradient(loss, expected, method)


def drawn_neighbors(method, z, index):
    return method.draw(method.neighbors(z, index))


def test_an_older_entry_of_the_same_image_is_no_neighbor_however_near():
    """But where it is not masked, as in the official code, or shows another image."""
    for mask_own in (True, False):
        method, batch = nnclr(predictor=False, mask_own=mask_own), double_at(0)
        z1, _ = (view.detach() for view in embeddings(method, batch))
        method.support_set.enqueue(z1, batch.index)
        neighbors = drawn_neighbors(method, z1, batch.index)
        assert (((neighbors * z1).sum(dim=1) < 0.999) == mask_own).all()
        method.support_set.index[:BATCH] += NUM_IMAGES  # others than those of the batch
        torch.testing.assert_close(drawn_neighbors(method, z1, batch.index), z1)
    method = nnclr(num_neighbors=40)  # of which one is drawn, though all are neighbors
    method.support_set.enqueue(z1, batch.index)
    drawn = torch.stack([drawn_neighbors(method, z1, batch.index) for _ in range(20)])
    assert ((drawn * z1).sum(dim=2) < 0.999).all()


def test_a_support_set_of_one_entry_is_refused_where_it_may_be_the_images_own():
    with pytest.raises(UsageError, match="support_size 1 has no neighbor for the image whose"):
        nnclr(support_size=1)
    method, batch = nnclr(support_size=1, mask_own=False), double_at(0)
    z1, _ = (view.detach() for view in embeddings(method, batch))
    neighbors = drawn_neighbors(method, z1, batch.index)
    assert torch.equal(neighbors, method.support_set.keys.expand_as(z1))


def test_nt_xent_is_lightlys_over_neighbors_and_predictions_together():
    """2N rows, of which each has one partner and 2N - 2 negatives; the mean of both directions."""
    method, batch = nnclr(loss="nt_xent", num_neighbors=1), double_at(0)
    (z1, z2), losses = (z.detach() for z in embeddings(method, batch)), []
    p1, p2 = predictions(method, batch)
    for z, p in ((z1, p2), (z2, p1)):
        rows = torch.cat([drawn_neighbors(method, z, batch.index), p])
        logits = (rows @ rows.T / method.temperature).fill_diagonal_(-torch.inf)
        losses.append(F.cross_entropy(logits, torch.arange(2 * BATCH).roll(BATCH)))
    torch.testing.assert_close(method(batch, 0.5).loss, torch.stack(losses).mean())


def test_no_image_is_ever_its_own_neighbor():
    """Over twenty steps, with a support set half as large as the data."""
    method, optimizer = small("nnclr", support_size=NUM_IMAGES // 2, num_neighbors=5), None
    count = own = met = 0
    for step in range(20):
        start = (step, optimizer)
        _, optimizer = run(method, "nnclr", until=step + 1, total=20, start=start)
        batch, support = batch_at(step + 1), method.support_set
        met += int(torch.isin(batch.index, support.index).sum())
        for view in batch.views:
            neighbors = drawn_neighbors(method, unit(method.online(view)).detach(), batch.index)
            whose = support.index[(neighbors @ support.keys.T).argmax(dim=1)]
            own += int((whose == batch.index).sum())
            count += len(neighbors)
    assert (own, count) == (0, 640)
    assert met > 100  # images that were there to be found


def test_a_neighbor_is_drawn_evenly_from_the_nearest_and_from_nowhere_else():
    torch.manual_seed(SEED)
    method = nnclr(num_neighbors=5)
    z = unit(torch.randn(1, 8, dtype=torch.float64))
    nearest = (z @ method.support_set.keys.T).topk(5).indices.squeeze().tolist()
    neighbors = drawn_neighbors(method, z.expand(4000, -1), torch.arange(4000))
    rows = (neighbors @ method.support_set.keys.T).argmax(dim=1)
    counts = torch.bincount(rows, minlength=40)
    assert set(counts.nonzero().flatten().tolist()) == set(nearest)
    assert chisquare(counts[nearest]).pvalue > 0.001


def test_only_first_views_join_the_support_set_once_and_after_the_loss():
    method, batch = nnclr(symmetric="both"), double_at(0)
    before = method.support_set.keys.clone()
    step = method(batch, 0.5)
    assert torch.equal(method.support_set.keys, before)
    method.commit(step.memo, 0.5)
    z1, _ = embeddings(method, batch)
    torch.testing.assert_close(method.support_set.keys[:BATCH], z1.detach())
    assert torch.equal(method.support_set.keys[BATCH:], before[BATCH:])
    assert method.support_set.index[:BATCH].tolist() == batch.index.tolist()
    assert method.support_set.cursor == BATCH


def test_neighbors_are_found_in_single_precision_under_autocast(monkeypatch):
    """As on a GPU, where `@` is not left to oneDNN."""
    monkeypatch.setattr(fused, "_onednn_agrees", lambda: False)
    method, z = small("nnclr", support_size=200, num_neighbors=5), unit(torch.randn(40, 8))
    method.support_set.index.fill_(NUM_IMAGES)
    index = torch.arange(40)
    expected = method.neighbors(z, index)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(method.neighbors(z, index), expected)
