"""What is particular to methods whose batch is all they know: SimCLR, Barlow Twins, VICReg, LeJEPA."""

import itertools

import pytest
import restated
import torch
import torch.nn.functional as F
from restated import lists
from small import BATCH, double_at, double_for, small

from nearkin.objectives import unit
from nearkin.types import Batch


def embeddings(method, batch):
    return [method.online(view) for view in batch.views]


def test_the_cross_view_form_is_the_cross_entropy_of_first_views_among_second_ones():
    method = small("simclr", loss="cross_view", temperature=0.3).double().eval()
    batch = double_at(0)
    z1, z2 = map(unit, embeddings(method, batch))
    expected = F.cross_entropy(z1 @ z2.T / 0.3, torch.arange(BATCH))
    torch.testing.assert_close(method(batch, 0.5).loss, expected)


def test_simclr_at_scale_two_is_the_official_sum_over_first_and_second_views():
    """Each of the two means is over its N views, with the others of both kinds as negatives."""
    method, batch = small("simclr", scale=2.0).double(), double_at(0)
    z1, z2 = unit(method.online(torch.cat(batch.views))).chunk(2)
    own = torch.arange(len(z1))
    never = torch.full((len(z1),), -1e9, dtype=torch.float64).diag()
    aa, ab, ba, bb = (a @ b.T / method.temperature for a in (z1, z2) for b in (z1, z2))
    expected = F.cross_entropy(torch.cat([ab, aa + never], 1), own)
    expected = expected + F.cross_entropy(torch.cat([ba, bb + never], 1), own)
    torch.testing.assert_close(method(batch, 0.0).loss, expected)


@pytest.mark.parametrize("name", ["simclr", "simgcd"])
def test_views_share_their_batch_statistics(name):
    """Were they normalized apart, the second view could be moved without any effect."""
    method, batch = small(name).double(), double_for(name)
    moved = Batch((batch.views[0], batch.views[1] + 1), batch.index, batch.label)
    assert abs(method(moved, 0.5).loss - method(batch, 0.5).loss) > 0.01


def test_barlow_twins_sums_over_the_correlation_of_both_views():
    method = small("barlow_twins", off_diagonal=0.3, scale=0.024).double().eval()
    batch = double_at(0)
    expected = restated.barlow_twins(*lists(embeddings(method, batch)), 0.3)
    assert method(batch, 0.5).loss.item() == pytest.approx(0.024 * expected)


def test_vicreg_adds_what_the_views_lack_in_agreement_spread_and_independence():
    weights = dict(invariance=2.0, variance=3.0, covariance=5.0)
    method, batch = small("vicreg", **weights).double().eval(), double_at(0)
    expected = restated.vicreg(*lists(embeddings(method, batch)), **weights)
    assert method(batch, 0.5).loss.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("simclr", dict(temperature=0.3)),
        ("vicreg", dict(invariance=2.0, variance=3.0, covariance=5.0)),
    ],
)
def test_of_four_views_it_is_the_mean_over_their_six_pairs(name, options):
    method, batch = small(name, **options).double().eval(), double_at(0, num_views=4)
    views = embeddings(method, batch)
    if name == "simclr":
        options, views = [options["temperature"]], [unit(z) for z in views]
    pairs = itertools.combinations(lists(views), 2)
    terms = {
        "simclr": lambda a, b: restated.nt_xent(a, b, *options),
        "vicreg": lambda a, b: restated.vicreg(a, b, **options),
    }
    expected = restated.mean([terms[name](a, b) for a, b in pairs])
    assert method(batch, 0.5).loss.item() == pytest.approx(expected)


def test_lejepa_predicts_the_mean_of_the_large_views_and_draws_one_set_of_directions_a_step():
    method, batch = small("sigreg", weight=0.2).double().eval(), double_at(0, num_views=4)
    torch.manual_seed(5)
    loss = method(batch, 0.5).loss.item()
    torch.manual_seed(5)
    directions = [restated.normalized(a) for a in torch.randn(12, 8, dtype=torch.float64).tolist()]
    views = [z.tolist() for z in embeddings(method, batch)]
    center = [[(a + b) / 2 for a, b in zip(*pair)] for pair in zip(*views[:2])]
    off = [(x - c) ** 2 for z in views for u, v in zip(z, center) for x, c in zip(u, v)]
    spread = restated.mean([restated.sigreg(z, directions) for z in views])
    assert loss == pytest.approx(0.8 * restated.mean(off) + 0.2 * spread)
