"""The planted bugs still fit the code. That they are caught is what `make planted` shows."""

import ast

import pytest
from planted import ROOT, Bug, planted


def test_there_are_enough_of_them():
    assert len(planted([])) >= 25


@pytest.mark.parametrize("bug", planted([]), ids=lambda bug: bug.path.stem)
def test_a_bug_can_be_planted_and_names_a_test_that_is_there(bug: Bug):
    bug.apply(ROOT, "--check")
    assert bug.header("Bug")
    assert bug.header("Seen in")
    file, _, test = bug.header("Test").partition("::")
    tree = ast.parse((ROOT / file).read_text())
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert test.partition("[")[0].rpartition(".")[2] in defined
