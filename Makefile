# make demo   train, evaluate and discover on real digits      make test   all checks and tests
# PYTHON is the interpreter (3.11 or newer) that creates the environment in .venv.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/

.PHONY: demo test check planted mutation faults format docs site dist clean

demo: $(VENV)/installed
	$(RUN)nearkin demo

test: check
	$(RUN)python -m pytest -q -m "not slow" --numprocesses auto --maxprocesses 8 --dist loadfile --durations 40 --durations-min 5

check: $(VENV)/developed
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy
	$(RUN)lint-imports --no-cache

# Apply one known bug at a time, and write into docs/planted.csv which tests catch it: hours at
# first; stop it at any time. PLANTED=--named runs only the test that each bug names.
planted: $(VENV)/developed
	$(RUN)python tests/planted.py $(PLANTED)

# Share of random changes that the tests of a room notice, in docs/mutation.csv. Stop it at any time.
mutation: $(VENV)/developed
	$(RUN)python -m pip install --quiet cosmic-ray
	$(RUN)python tests/mutation.py $(ROOMS)

# Slow tests, then a thousand kills of runs of every method. Stop it at any time; the same command
# continues.
faults: $(VENV)/developed
	$(RUN)python -m pytest -q -m slow
	$(RUN)python tests/faults.py --kills 1000 -o docs/faults.csv
	$(RUN)python tests/soak.py 50000
	$(RUN)python tests/fuzz_images.py 10000 0

format: $(VENV)/developed
	$(RUN)ruff check --fix .
	$(RUN)ruff format .

# The page of each method, from its code, its recipes and docs/measured.toml; the image and the counts
# of docs/architecture.md, from the source; the section of docs/results.md beside lightly, from the
# rows in docs/results.
docs: $(VENV)/installed
	$(RUN)python docs/method_pages.py
	$(RUN)python docs/architecture.py
	$(RUN)python benchmarks/reproduce/table.py

# Wheel and sdist, the former built from the latter.
dist: $(VENV)/developed
	rm -rf dist
	$(RUN)python -m build
	$(RUN)twine check --strict dist/*

# The documentation as a site, in build/site. A warning is an error: links that lead nowhere, pages
# that no page leads to.
site: $(VENV)/installed
	$(RUN)python -m pip install --quiet --editable '.[docs]'
	$(RUN)python -m sphinx -q -E -W --keep-going -b html docs build/site

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nearkin needs Python 3.11 or newer: make PYTHON=python3.12")'
	test -x $(RUN)python || $(PYTHON) -m venv $(VENV)
	$(RUN)python -m pip install --quiet --editable .
	touch $@

$(VENV)/developed: $(VENV)/installed
	$(RUN)python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
