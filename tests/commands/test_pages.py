"""The pages of the methods say what the code does, and are what is committed."""

import copy
import inspect
import re
import sys
import tomllib
import typing
from pathlib import Path

import pytest
import torch
from method_pages import RECIPES, full_page, pages, write_pages
from small import batch_for, run, small

from nearkin.cli import main
from nearkin.commands.info import page
from nearkin.methods import METHODS, parameters
from nearkin.run.settings import default_options

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "methods"
RUNS = tomllib.loads((ROOT / "docs" / "measured.toml").read_text())["run"]
every_method = pytest.mark.parametrize("name", METHODS)


def section(name, title):
    return full_page(name, ROOT).split(f"\n## {title}\n")[1].split("\n## ")[0].strip("\n")


def test_the_committed_pages_are_made_from_the_code_as_it_is():
    committed = {path.name: path.read_text() for path in PAGES.iterdir()}
    made = pages(ROOT)
    stale = [name for name in committed | made if committed.get(name) != made.get(name)]
    assert not stale, "run `make docs`, and delete pages of methods that are no more"


def test_writing_the_pages_writes_what_is_committed(tmp_path):
    (tmp_path / "docs" / "methods").mkdir(parents=True)
    write_pages(tmp_path)
    written = {path.name for path in (tmp_path / "docs" / "methods").iterdir()}
    assert written == {path.name for path in PAGES.iterdir()}


def typed(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


@every_method
def test_every_option_has_a_row_with_its_meaning_and_its_defaults(name):
    rows = [line for line in section(name, "Options").splitlines() if line.startswith("| `--")]
    documented = " ".join((inspect.getdoc(METHODS[name]) or "").split())
    options = parameters(METHODS[name])
    assert len(rows) == len(options)
    for row, (key, parameter) in zip(rows, options.items()):
        option, meaning, default, here = (cell.strip() for cell in row.strip("|").split("|"))
        assert option == "`--" + key.replace("_", "-") + "`"
        assert f"{key}: {meaning.split('. ')[0]}" in documented
        own = default_options(METHODS[name])[key]
        assert default == typed(parameter.default)
        assert here == ("" if own == parameter.default else typed(own))
        choices = (
            typing.get_args(parameter.annotation)
            if typing.get_origin(parameter.annotation) is typing.Literal
            else ()
        )
        assert all(choice in meaning for choice in choices)


def test_a_method_without_options_says_so():
    assert section("rotnet", "Options") == "None."


@every_method
def test_the_equation_is_on_the_page_as_it_stands_in_the_module(name):
    equation = section(name, "Equation").splitlines()
    module = sys.modules[METHODS[name].__module__].__doc__.splitlines()
    lines = [line for line in module if line.startswith("    ")]
    assert [line for line in equation if line.startswith("    ")] == lines
    assert "loss" in "".join(lines)
    assert max(map(len, lines)) <= 4 + 78  # else a terminal of 80 columns breaks them


@every_method
def test_names_in_code_type_among_the_letters_of_an_equation_are_options(name):
    letters = section(name, "Equation").split("\n\n")[-2]
    assert set(re.findall(r"`(\w+)`", letters)) <= set(parameters(METHODS[name]))


@every_method
def test_queries_and_keys_are_on_the_page_and_in_the_table_of_all(name):
    queries, keys = re.fullmatch(
        r"Queries: (.+)\. Keys: (.+)\.", section(name, "Equation").split("\n\n")[-1]
    ).groups()
    assert f"| {queries} | {keys} |" in pages(ROOT)["README.md"]


@every_method
def test_every_paper_that_a_module_cites_is_linked(name):
    cited = re.findall(r"arXiv:([\d.]*\d)", sys.modules[METHODS[name].__module__].__doc__)
    assert cited
    for number in cited:
        assert f"(https://arxiv.org/abs/{number})" in section(name, "Paper")


@every_method
def test_commit_writes_nothing_exactly_where_the_page_says_so(name):
    method = small(name)
    run(method, name, until=2)
    memo = method(batch_for(name, 2), progress=0.5).memo
    before = copy.deepcopy(method.state_dict())
    method.commit(memo, 0.5)
    changed = [
        key for key, now in method.state_dict().items() if not torch.equal(now, before[key])
    ]
    content = section(name, "What `commit` writes")
    assert (content == "Nothing.") == (not changed)
    assert "by default" not in content  # the docstring of a method that forgot its own


def test_half_lives_are_when_half_of_the_past_is_left():
    pairs = re.findall(r"([\d.]+) at (0\.[\d]+)[,.]", "".join(pages(ROOT).values()))
    assert ("693", "0.999") in pairs
    for life, momentum in pairs:
        assert float(momentum) ** float(life) == pytest.approx(0.5, abs=0.002)


@every_method
def test_every_momentum_has_a_half_life(name):
    momenta = set(parameters(METHODS[name])) & {"momentum", "center_momentum"}
    assert section(name, "Options").count("Half-life in ") == len(momenta)


@pytest.mark.parametrize(("name", "clock"), [("moco", "steps"), ("moco_memory_bank", "visits")])
def test_encoders_move_at_each_step_and_rows_of_a_bank_at_each_visit(name, clock):
    assert f"Half-life in {clock}: " in section(name, "Options")


def test_recipes_are_linked_from_the_method_that_they_name(tmp_path):
    for path, method in [("cifar10/moco_v1", "moco"), ("imagenet/simclr", "simclr")]:
        file = tmp_path / RECIPES / f"{path}.toml"
        file.parent.mkdir(parents=True)
        file.write_text(f'# On some data.\nmethod = "{method}"\nepochs = 200\n')
    link = f"- [recipe:cifar10/moco_v1](../../{RECIPES}/cifar10/moco_v1.toml): On some data."
    assert link in full_page("moco", tmp_path)
    assert "imagenet" not in full_page("moco", tmp_path)
    assert "recipe:" not in full_page("moco_v3", tmp_path)


def test_every_recipe_is_linked_from_one_page():
    everything = "".join(pages(ROOT).values())
    for path in {*ROOT.glob(f"{RECIPES}/*/*.toml")} - {*ROOT.glob(f"{RECIPES}/discovery/*")}:
        assert everything.count(f"(../../{path.relative_to(ROOT).as_posix()})") == 1, path


def heading_anchors(text):
    """As GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_no_link_leads_nowhere():
    targets = re.findall(r"\]\((?!https://)([^)]*)\)", "".join(pages(ROOT).values()))
    assert targets
    for target in set(targets):
        path, _, anchor = target.partition("#")
        assert (PAGES / path).is_file(), target
        assert not anchor or anchor in heading_anchors((PAGES / path).read_text()), target


@pytest.mark.parametrize("entry", RUNS, ids=lambda entry: f"{entry['method']} {entry['data']}")
def test_measured_numbers_stand_in_the_page_that_tells_how_they_came_about(entry):
    page = (PAGES.parent / entry["page"].partition("#")[0]).read_text().replace("**", "")
    assert entry["command"].strip() in page
    assert entry["commit"] in (*re.findall(r"\b[0-9a-f]{7}\b", page), "not recorded")
    for measured in entry["found"]:
        low, high = measured["interval"]
        assert low < measured["value"] < high
        value = f"{measured['value']:.3f} [{low:.3f}, {high:.3f}]"
        assert f"| {value} |" in page
        floors = f"{measured['raw_pixels']:.3f} | {measured['untrained_network']:.3f}"
        assert f"| {measured['what']} | {value} | {floors} |" in section(
            entry["method"], "Measured"
        )
        for floor in floors.split(" | "):
            assert f"| {floor} [" in page


@every_method
def test_a_method_is_said_to_be_measured_only_if_it_was(name):
    measured = any(entry["method"] == name for entry in RUNS)
    assert measured == (section(name, "Measured") != "Not run.")


def test_the_command_says_where_recipes_and_results_are():
    text = page("moco")
    assert "docs/methods/moco.md in the repository" in text
    assert "Not run" not in text


@every_method
def test_the_command_line_shows_the_page_in_80_columns_with_nothing_cut_off(
    name, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["methods", name]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    assert "\x1b" not in output
    assert "…" not in output
    for key in parameters(METHODS[name]):
        assert f" --{key.replace('_', '-')} " in output
    for line in section(name, "Equation").splitlines():
        assert not line.startswith("    ") or line.strip() in output


def test_the_list_has_every_method_in_a_sentence(capsys):
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(METHODS)
    assert all(line.endswith(".") for line in lines)


@pytest.mark.parametrize(("name", "meant"), [("mocov3", "moco_v3"), ("simlcr", "simclr")])
def test_a_bad_name_is_one_line_with_what_may_have_been_meant(name, meant, capsys):
    assert main(["methods", name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"error: unknown method {name}. Did you mean {meant}?")
