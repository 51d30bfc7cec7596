"""Probes that choose as they do for users."""

import pytest

from nearkin.metrics import probe


@pytest.fixture(autouse=True)
def usual_choice(monkeypatch, usual_probes):
    for name, value in usual_probes.items():
        monkeypatch.setattr(probe, name, value)
