# make demo    train, evaluate and discover on real digits
# make test    linters, types and tests: all that must pass      make quick   some tests, in minutes
# PYTHON is the interpreter (3.11 or newer) that creates the environment in .venv.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/
EXAMPLE = build/example/example-report.html
# More than eight processes only wait for the longest file of tests.
PYTEST = $(RUN)python -m pytest -q --numprocesses auto --maxprocesses 8 --dist loadfile

.PHONY: demo test tests quick cov nightly check lint planted mutation faults format docs site links dist lock clean

demo: $(VENV)/installed
	$(RUN)nearkin demo --overwrite

# Types are checked beside the tests. What is wrong with them stands below what is wrong with these.
test: lint
	@mkdir -p build
	@$(RUN)mypy > build/types.txt & types=$$!; \
	$(MAKE) --no-print-directory tests; tests=$$?; \
	wait $$types || { cat build/types.txt; exit 1; }; \
	exit $$tests

tests: $(VENV)/developed
	$(PYTEST) -m "not slow" --durations 40 --durations-min 5

# Equations, networks, methods and files of earlier releases: no whole runs.
quick: $(VENV)/developed
	$(PYTEST) -m "not slow" src tests/objectives tests/metrics tests/networks tests/methods tests/formats

# The report is build/coverage/index.html.
cov: $(VENV)/developed
	$(PYTEST) -m "not slow" --cov --cov-report html --cov-report xml --cov-report term:skip-covered

# All tests, the slow ones too, in a new order each time, and types in whole runs.
# `pytest -p randomly --randomly-seed N` repeats the order of the seed that is printed first.
nightly: check
	$(PYTEST) -p randomly --types --timeout 3600 -rs
	$(RUN)python tests/planted.py
	$(RUN)python tests/fuzz_images.py 2000 0
	$(RUN)python tests/soak.py 5000

check: lint
	$(RUN)mypy

# What takes seconds, before anything else.
lint: $(VENV)/developed
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)lint-imports --no-cache
	$(RUN)zizmor --quiet --offline .github
	$(RUN)python docs/words.py

# Apply one known bug at a time, and run the test that must catch it. PLANTED=moco takes some of them.
planted: $(VENV)/developed
	$(RUN)python tests/planted.py $(PLANTED)

# Share of random changes that the tests of a package notice, in docs/mutation.csv. Stop it at any time.
mutation: $(VENV)/developed
	$(RUN)python -m pip install --quiet cosmic-ray
	$(RUN)python tests/mutation.py $(ROOMS)

# Slow tests, then a thousand kills of runs of every method. Stop it at any time; the same command
# continues.
faults: $(VENV)/developed
	$(RUN)python -m pytest -q -m slow --timeout 3600
	$(RUN)python tests/faults.py --kills 1000 -o docs/faults.csv
	$(RUN)python tests/soak.py 50000
	$(RUN)python tests/fuzz_images.py 10000 0

format: $(VENV)/developed
	$(RUN)ruff check --fix .
	$(RUN)ruff format .

# The page of each method, from its code, its recipes and docs/measured.toml; the section of
# docs/results.md beside lightly, from the rows in docs/results.
docs: $(VENV)/installed
	$(RUN)python docs/method_pages.py
	PYTHONPATH=. $(RUN)python docs/results_page.py
	$(RUN)python -m benchmarks.discovery.tables

# The documentation as a site, in build/site. A warning is an error: links that lead nowhere, pages
# that no page leads to.
site: $(VENV)/developed $(EXAMPLE)
	$(RUN)python -m sphinx -q -E -W --keep-going -b html docs build/site

# A report that the site shows: of the discovery of the demo.
$(EXAMPLE): $(VENV)/installed
	$(RUN)nearkin demo -q -o build/demo --overwrite
	@mkdir -p $(@D) && cp build/demo/discover/report.html $@

# Whether the links to other sites lead somewhere.
links: $(VENV)/developed
	$(RUN)python -m sphinx -q -E -b linkcheck docs build/links

# Wheel and sdist, the former built from the latter.
dist: $(VENV)/developed
	rm -rf dist
	$(RUN)python -m build
	$(RUN)twine check --strict dist/*

# The versions that pull requests are tested with. It needs uv.
lock:
	uv lock --upgrade
	uv export --quiet --all-groups --all-extras --no-emit-project --no-hashes --no-annotate -o .github/constraints.txt

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nearkin needs Python 3.11 or newer: make PYTHON=python3.12")'
	test -x $(RUN)python || $(PYTHON) -m venv $(VENV)
	$(RUN)python -m pip install --quiet --editable .
	touch $@

# The pip of a new environment with Python 3.11 is 23.2, which knows no groups.
$(VENV)/developed: $(VENV)/installed
	$(RUN)python -m pip install --quiet 'pip>=25.1'
	$(RUN)python -m pip install --quiet --editable . --group dev
	touch $@

clean:
	rm -rf dist build .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis
