"""What is particular to methods whose batch is all they know: SimCLR, Barlow Twins, VICReg."""

import pytest
import torch
import torch.nn.functional as F
from small import BATCH, as_double, batch_at, small
from torch import nn

from nearkin.objectives import unit
from nearkin.types import Batch


def embeddings(method, batch):
    return [method.online(view) for view in batch.views]


# SimCLR


def test_nt_xent_is_the_cross_entropy_of_every_view_without_itself():
    method, batch = small("simclr", temperature=0.3).double().eval(), as_double(batch_at(0))
    z = unit(torch.cat(embeddings(method, batch)))
    logits = (z @ z.T / 0.3).fill_diagonal_(-torch.inf)
    partner = torch.arange(2 * BATCH).roll(BATCH)
    torch.testing.assert_close(method(batch, 0.5).loss, F.cross_entropy(logits, partner))


def test_the_cross_view_form_is_the_cross_entropy_of_first_views_among_second_ones():
    method = small("simclr", loss="cross_view", temperature=0.3).double().eval()
    batch = as_double(batch_at(0))
    z1, z2 = map(unit, embeddings(method, batch))
    expected = F.cross_entropy(z1 @ z2.T / 0.3, torch.arange(BATCH))
    torch.testing.assert_close(method(batch, 0.5).loss, expected)


def test_simclr_at_scale_two_is_the_official_sum_over_first_and_second_views():
    """Each of the two means is over its N views, with the others of both kinds as negatives."""
    method, batch = small("simclr", scale=2.0).double(), as_double(batch_at(0))
    z1, z2 = unit(method.online(torch.cat(batch.views))).chunk(2)
    own = torch.arange(len(z1))
    never = torch.full((len(z1),), -1e9, dtype=torch.float64).diag()
    aa, ab, ba, bb = (a @ b.T / method.temperature for a in (z1, z2) for b in (z1, z2))
    expected = F.cross_entropy(torch.cat([ab, aa + never], 1), own)
    expected = expected + F.cross_entropy(torch.cat([ba, bb + never], 1), own)
    torch.testing.assert_close(method(batch, 0.0).loss, expected)


def test_simclr_does_not_care_which_view_is_first():
    method = small("simclr").double()
    batch = as_double(batch_at(0))
    swapped = Batch(batch.views[::-1], batch.index, batch.label)
    torch.testing.assert_close(method(swapped, 0.5).loss, method(batch, 0.5).loss)


def test_simclrs_views_share_their_batch_statistics():
    """Were they normalized apart, the second view could be moved without any effect."""
    method, batch = small("simclr").double(), as_double(batch_at(0))
    moved = Batch((batch.views[0], batch.views[1] + 1), batch.index, batch.label)
    assert abs(method(moved, 0.5).loss - method(batch, 0.5).loss) > 0.01


# Barlow Twins and VICReg


def test_barlow_twins_sums_over_the_correlation_of_both_views():
    """Zbontar et al. 2021, equations 1 and 2; the code's batch norm adds 1e-5 to variances."""
    method = small("barlow_twins", off_diagonal=0.3, scale=0.024).double().eval()
    batch = as_double(batch_at(0))
    z1, z2 = embeddings(method, batch)
    over = torch.outer(*((z.var(dim=0, correction=0) + 1e-5).sqrt() for z in (z1, z2)))
    correlation = (z1 - z1.mean(dim=0)).T @ (z2 - z2.mean(dim=0)) / BATCH / over
    weight = torch.full((16, 16), 0.3).double().fill_diagonal_(1.0)
    expected = 0.024 * (weight * (correlation - torch.eye(16)).square()).sum()
    torch.testing.assert_close(method(batch, 0.5).loss, expected)


def test_vicreg_adds_what_the_views_lack_in_agreement_spread_and_independence():
    """Bardes et al. 2022, equations 1 to 6; the hinge as the official code has it."""
    method = small("vicreg", invariance=2.0, variance=3.0, covariance=5.0).double().eval()
    batch = as_double(batch_at(0))
    z1, z2 = embeddings(method, batch)
    expected = 2.0 * (z1 - z2).square().mean()
    for z in (z1, z2):
        expected = expected + 3.0 * (1 - (z.var(dim=0) + 1e-4).sqrt()).clamp(min=0).mean() / 2
        expected = expected + 5.0 * (z.T.cov() * (1 - torch.eye(16))).square().sum() / 16
    torch.testing.assert_close(method(batch, 0.5).loss, expected)


@pytest.mark.parametrize("name", ["barlow_twins", "vicreg"])
def test_their_projector_has_three_layers_of_one_width(name):
    method = small(name)
    layers = [m for m in method.online.projector if isinstance(m, nn.Linear)]
    assert [layer.out_features for layer in layers] == [16, 16, 16]
    assert sum(isinstance(m, nn.BatchNorm1d) for m in method.online.projector) == 2
