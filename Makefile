# On a new machine, `make demo` and `make test` do all of the set-up.
PYTHON ?= python3
PYTHONS ?= python3.11 python3.12 python3.13
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CONSTRAINTS := constraints.txt
LATEST := .venv-latest
CODE := src tests benchmarks examples tools

CHROMIUM := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
AS_ROOT := $(if $(filter-out 0,$(shell id -u)),sudo -n)

.PHONY: demo test test-fast test-long test-latest expected-text chromium check lint-ci format docs site metrics lock clean

demo: $(INSTALLED)
	$(BIN)/longtail demo

# Several processes with one thread each. Tests of a file run in one process, because they share fixtures; long tests are distributed.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q -n logical --maxprocesses 8

test: $(INSTALLED) check
	$(PYTEST) -m "not long" --dist loadfile

# Unit tests of losses, methods, metrics, configuration and reports: about a minute on two cores.
UNIT := tests/losses tests/methods tests/report tests/theory tests/test_config.py tests/test_metrics.py tests/test_recipes.py

test-fast: $(INSTALLED)
	$(PYTEST) -m "not long" --dist loadfile --ignore tests/methods/test_processes.py $(UNIT)

test-long: $(INSTALLED) chromium
	$(PYTEST) -m long -rs --dist worksteal

# The suite with the newest release of every dependency, in an environment of its own. Run it before `make lock`.
test-latest:
	$(PYTHON) -m venv --clear $(LATEST)
	$(LATEST)/bin/python -m pip install --quiet --upgrade pip
	$(LATEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable ".[dev]"
	touch $(LATEST)/.installed
	$(MAKE) test VENV=$(LATEST)

# Store the present text of tests that compare output with tests/expected_text. Review the difference before a commit.
expected-text: $(INSTALLED)
	OMP_NUM_THREADS=1 LONGTAIL_UPDATE_TEXT=1 $(BIN)/pytest -q $$(grep -rl --include='test_*.py' check_text tests)

# Some long tests open pages in a browser. Chromium is installed from Debian if this is allowed; otherwise they are skipped.
chromium:
	@test -n "$(CHROMIUM)" || { \
	  echo "fetching Chromium, for tests that open pages"; \
	  { $(AS_ROOT) apt-get -qq update && $(AS_ROOT) apt-get -qq install -y chromium; } </dev/null >/dev/null 2>&1; \
	} || echo "Chromium cannot be fetched here: tests that open pages will be skipped"

check: $(INSTALLED)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

# Check workflows, Dockerfile, CITATION.cff and other files of the project that cannot be run on a laptop.
lint-ci: $(INSTALLED)
	$(BIN)/pytest -q -rs tests/test_project_files.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(INSTALLED)
	$(BIN)/python -m longtail.cli.reference docs/commands.md

# The documentation as a site in site/, to be read offline. Every warning is an error.
site: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# Print figures about the code: files, lines, docstrings, calls; for comparison before and after a change.
metrics: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tools/code_metrics.py

# Exact versions, so that a release of a dependency cannot break the set-up. The pip that comes with Python may be too old for
# build constraints, so the pinned one is installed first. torch and torchvision come together from the same index: a CPU build
# of one does not work with another build of the other.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) pip
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --build-constraint $(CONSTRAINTS) --editable ".[dev]"
	touch $@

# Pin the newest releases that work with all of $(PYTHONS). Where they are not on the path, name them: make lock PYTHONS="..."
lock:
	$(PYTHON) tools/lock.py $(CONSTRAINTS) $(PYTHONS)

clean:
	rm -rf $(VENV) $(LATEST) build dist .mypy_cache .ruff_cache .pytest_cache
