"""What commands say of images that the run of an encoder has held out, and of no others."""

import numpy as np
import pytest
from nearkin_command import run


@pytest.fixture(scope="module")
def held_out(tmp_path_factory, digits_file):
    """The images that `trained_run` has held out, with their labels."""
    with np.load(digits_file) as stored:
        arrays = {"images": stored["x_test"], "labels": stored["y_test"]}
    path = tmp_path_factory.mktemp("held-out") / "digits.npz"
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("verb", ["embed", "evaluate"])
def test_they_are_measured_as_far_as_that_takes_no_training_images(
    verb, trained_run, held_out, tmp_path, capsys
):
    more = ["-o", tmp_path / "run"] if verb == "embed" else ["--protocol", "full"]
    assert run(verb, trained_run, held_out, *more) == 0
    table = capsys.readouterr().out
    for name in ("cluster accuracy", "view retrieval", "effective rank"):
        assert any(line.startswith(name) for line in table.splitlines()), name
    assert "kNN top-1: not measured, kNN needs labeled training images" in table


@pytest.mark.parametrize("command", [["train"], ["classify"], ["discover", "--known", "0,1,2"]])
def test_nothing_is_learned_from_them(command, trained_run, held_out, tmp_path, refusal):
    verb, *settings = command
    given = [trained_run, held_out] if verb == "classify" else [held_out, "--encoder", trained_run]
    line = refusal(3, verb, *given, *settings, "-o", tmp_path / "run")
    assert "held all 40 images out" in line


def test_their_page_names_no_step_that_is_refused(reports, trained_run, held_out, tmp_path):
    assert run("embed", trained_run, held_out, "-o", tmp_path / "run") == 0
    page = (tmp_path / "run" / "report.html").read_text()
    steps = page[page.index("Next steps") :]
    assert "nearkin neighbors" in steps
    assert not [verb for verb in ("train", "discover", "classify") if f"nearkin {verb}" in steps]
    assert "kNN top-1: not measured" in page
    assert "Confusion: kNN predictions" not in page
