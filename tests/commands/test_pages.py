"""The pages of the methods say what the code does, and are what is committed."""

import copy
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from method_pages import RECIPES, write_pages
from nearkin_command import run
from small import batch_for, small
from small import run as run_steps

from nearkin.commands.lists import describe_method
from nearkin.methods import METHODS, parameters
from nearkin.toml import read_toml

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "methods"
RUNS = tomllib.loads((ROOT / "docs" / "measured.toml").read_text())["run"]


@cache
def made():
    """The pages, by the names of their files: each reads all recipes."""
    with TemporaryDirectory() as folder:
        write_pages(Path(folder))
        return {path.name: path.read_text() for path in Path(folder).iterdir()}


def section(name, title):
    return made()[f"{name}.md"].split(f"\n## {title}\n")[1].split("\n## ")[0].strip("\n")


def indented(text):
    return [line for line in text.splitlines() if line.startswith("    ")]


def test_the_committed_pages_are_made_from_the_code_as_it_is():
    committed = {path.name: path.read_text() for path in PAGES.iterdir()}
    stale = [name for name in committed | made() if committed.get(name) != made().get(name)]
    assert not stale, "run `make docs`, and delete pages of methods that are no more"


def test_the_equation_is_on_the_page_as_it_stands_in_the_module_and_cited_papers_are_linked():
    letters = set()
    for name, cls in METHODS.items():
        equation = section(name, "Equation")
        lines = indented(sys.modules[cls.__module__].__doc__)
        assert indented(equation) == lines, name
        assert "loss" in "".join(lines), name
        assert max(map(len, lines)) <= 4 + 78, name  # else a terminal of 80 columns breaks them
        cited = re.findall(r"arXiv:([\d.]*\d)", sys.modules[cls.__module__].__doc__)
        assert cited, name
        for number in cited:
            assert f"(https://arxiv.org/abs/{number})" in section(name, "Paper"), name
        *_, options, roles = equation.split("\n\n")
        in_code = set(re.findall(r"`(\w+)`", options))
        assert in_code <= parameters(cls).keys(), name
        letters |= in_code
        queries, keys = re.fullmatch(r"Queries: (.+)\. Keys: (.+)\.", roles).groups()
        assert f"| {queries} | {keys} |" in made()["README.md"], name
    assert {"temperature", "momentum"} <= letters


@pytest.mark.parametrize("name", METHODS)
def test_commit_writes_nothing_exactly_where_the_page_says_so(name):
    method = small(name)
    run_steps(method, name, until=2)
    memo = method(batch_for(name, 2), progress=0.5).memo
    before = copy.deepcopy(method.state_dict())
    method.commit(memo, 0.5)
    after = method.state_dict()
    changed = [key for key, now in after.items() if not torch.equal(now, before[key])]
    content = section(name, "What `commit` writes")
    assert (content == "Nothing.") == (not changed)
    assert "by default" not in content  # the docstring of a method that forgot its own


def test_half_lives_are_when_half_of_the_past_is_left():
    pairs = re.findall(r"([\d.]+) at (0\.[\d]+)[,.]", "".join(made().values()))
    assert ("693", "0.999") in pairs
    for life, momentum in pairs:
        assert float(momentum) ** float(life) == pytest.approx(0.5, abs=0.002)
    for name, cls in METHODS.items():
        momenta = parameters(cls).keys() & {"momentum", "center_momentum"}
        assert section(name, "Options").count("Half-life in ") == len(momenta), name
    # Encoders move at each step, and rows of a bank at each visit.
    for name, clock in (("moco", "steps"), ("moco_memory_bank", "visits")):
        assert f"Half-life in {clock}: " in section(name, "Options")


def test_every_recipe_is_linked_from_one_page_which_is_that_of_its_method():
    recipes = {*ROOT.glob(f"{RECIPES}/*/*.toml")} - {*ROOT.glob(f"{RECIPES}/discovery/*")}
    assert len(recipes) > 20
    everything = "".join(made().values())
    for path in recipes:
        link = f"(../../{path.relative_to(ROOT).as_posix()})"
        assert everything.count(link) == 1, path
        assert link in made()[f"{read_toml(path)['method']}.md"], path


def test_measured_numbers_stand_in_the_page_that_tells_how_they_came_about():
    assert RUNS
    for entry in RUNS:
        case = f"{entry['method']} {entry['data']}"
        text = (PAGES.parent / entry["page"].partition("#")[0]).read_text().replace("**", "")
        assert entry["command"].strip() in text, case
        assert entry["commit"] in (*re.findall(r"\b[0-9a-f]{7,8}\b", text), "not recorded"), case
        for found in entry["found"]:
            low, high = found["interval"]
            assert low < found["value"] < high, case
            value = f"{100 * found['value']:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
            baselines = [
                f"{100 * found[name]:.1f} %" for name in ("raw_pixels", "untrained_network")
            ]
            row = f"| {found['what']} | {value} | {' | '.join(baselines)} |"
            assert row in section(entry["method"], "Measured"), case
            assert f"| {value} |" in text, case
            assert all(f"| {baseline} [" in text for baseline in baselines), case
    measured = {entry["method"] for entry in RUNS}
    for name in METHODS:
        assert (name in measured) == (section(name, "Measured") != "Not run."), name


def test_the_command_line_shows_the_page_in_80_columns_with_nothing_cut_off(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert "docs/methods/moco.md in the repository" in describe_method("moco")
    assert "Not run" not in describe_method("moco")
    assert run("list", "methods") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(METHODS)
    assert all(line.endswith(".") for line in lines)
    for name, cls in METHODS.items():
        assert run("list", "methods", name) == 0
        output = capsys.readouterr().out
        assert ("--teacher ENCODER" in output) == cls.uses_teacher
        assert max(map(len, output.splitlines())) <= 80, name
        assert not {"\x1b", "…"} & set(output), name
        for key in parameters(cls):
            assert f" --{key.replace('_', '-')} " in output, name
        for line in indented(section(name, "Equation")):
            assert line.strip() in output, name
