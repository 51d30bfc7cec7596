"""What several tests of images need."""

import pytest


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """Where nearkin keeps what it has found: an empty folder, for one test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "nearkin"
