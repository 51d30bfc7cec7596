"""Completion by Tab: the installed script offers commands, options and choices."""

import subprocess
from pathlib import Path

import pytest

from nearkin.cli import main

ASK = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_nearkin
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    return tmp_path


@pytest.mark.needs("bash")
def test_bash_completes_commands_options_and_choices(home, capsys):
    assert main(["--install-completion", "--shell", "bash"]) == 0
    script, _, rest = capsys.readouterr().out.partition(";")
    assert "shells that are started from now on" in rest
    assert script in (home / ".bashrc").read_text()

    def offered(*typed):
        command = ["bash", "--norc", "-c", ASK, "ask", script, "nearkin", *typed]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert offered("di") == ["discover"]
    assert {"train", "embed", "export"} <= {*offered("")}
    assert offered("train", "digits", "--opt") == ["--optimizer"]
    assert {"lars", "muon"} <= {*offered("train", "digits", "--optimizer", "")}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_it_too(home, shell, capsys):
    assert main(["--install-completion", "--shell", shell]) == 0
    assert "discover" in Path(capsys.readouterr().out.partition(";")[0]).read_text()


def test_where_it_cannot_be_installed_one_line_says_so(home, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(home / "file" / "below"))
    (home / "file").touch()
    assert main(["--install-completion", "--shell", "fish"]) == 4
    assert capsys.readouterr().err.startswith("error: cannot install completion: ")
