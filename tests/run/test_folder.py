"""What a run folder gives back, and to whom."""

import pytest

from nearkin.config import TrainConfig
from nearkin.errors import CheckpointError, UsageError
from nearkin.run.folder import KINDS, RunFolder
from nearkin.toml import read_toml


def test_a_run_says_of_which_kind_it_is(tmp_path):
    folder = RunFolder(tmp_path)
    for kind, settings in KINDS.items():
        folder.write_settings(settings(), "digits")
        assert folder.kind == kind
        assert folder.any_settings() == (settings(), "digits")
        if kind != "training":
            with pytest.raises(UsageError, match=f"is a {kind}; look at its report.html"):
                folder.settings()
            with pytest.raises(UsageError, match=f"of `nearkin {settings.verb}`, not of `nearkin"):
                read_toml(folder.config, TrainConfig)
    folder.config.write_text('data = "digits"\n')
    with pytest.raises(UsageError, match="names no kind of run"):
        folder.any_settings()


def test_a_damaged_summary_is_named_with_what_to_do(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.read_summary() == {}
    for damaged in ("{", "[]", "\0"):
        folder.summary.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"summary\.json cannot be used .*--resume"):
            folder.read_summary()
