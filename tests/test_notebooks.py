"""The notebooks of the documentation run from an empty folder.

For one epoch where a notebook trains longer, and in a process of their own, as people run them.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))
EXECUTE = [sys.executable, "-c", "from nbclient.cli import main; main()"]


@pytest.mark.slow
@pytest.mark.needs("nbclient")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path):
    text, trainings = re.subn(r"epochs=\d+", "epochs=1", notebook.read_text(encoding="utf-8"))
    assert trainings
    (tmp_path / notebook.name).write_text(text, encoding="utf-8")
    command = [*EXECUTE, "--timeout=600", str(tmp_path / notebook.name)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
