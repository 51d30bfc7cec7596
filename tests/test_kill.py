"""Five kills at random moments leave no trace in the result, for every method."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nearkin.methods import METHODS

HARNESS = Path(__file__).with_name("kills.py")


@pytest.mark.parametrize("method", METHODS)
def test_five_kills_and_resumes_end_where_the_unbroken_run_ends(method, tmp_path):
    command = [sys.executable, str(HARNESS), method, "5", "0", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == 5
    assert found["differing"] == []
    assert found["resumes"] >= 1, "most kills came before the first checkpoint"
    assert max(found["steps"]) > 0
