"""What several tests of images need."""

import multiprocessing

import pytest


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """Where nearkin keeps what it has found: an empty folder, for one test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "nearkin"


@pytest.fixture
def forkserver():
    """Let new processes be forks of a server, to which all that they need has to be sent."""
    from small import PRELOADED  # here, so that nothing is imported before it is checked

    multiprocessing.set_forkserver_preload(PRELOADED)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(None, force=True)
