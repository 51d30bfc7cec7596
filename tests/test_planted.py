"""The planted bugs still fit the code. That they are caught is what `make planted` shows."""

import ast

from planted import ROOT, planted


def test_every_bug_can_be_planted_and_names_a_test_that_is_there():
    bugs = planted([])
    assert bugs
    for bug in bugs:
        bug.apply(ROOT, "--check")
        assert bug.header("Bug")
        assert bug.header("Seen in")
        file, _, test = bug.header("Test").partition("::")
        tree = ast.parse((ROOT / file).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert test.partition("[")[0].rpartition(".")[2] in defined, bug.path.name
