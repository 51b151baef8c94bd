# Two commands do all the set-up on a bare machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CODE := src tests benchmarks examples tools

CHROMIUM := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
AS_ROOT := $(if $(filter-out 0,$(shell id -u)),sudo -n)

.PHONY: demo test test-long chromium check format docs metrics clean

demo: $(INSTALLED)
	$(BIN)/longtail demo

# Several processes of one thread each: a file's tests stay together where they share what they made, long ones go where there is room.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q -n logical --maxprocesses 8

test: $(INSTALLED) check
	$(PYTEST) -m "not long" --dist loadfile

test-long: $(INSTALLED) chromium
	$(PYTEST) -m long -rs --dist worksteal

# Some long tests open pages in a browser: Debian's is fetched where that is allowed, and else they are skipped.
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

format: $(INSTALLED)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(INSTALLED)
	$(BIN)/python -m longtail.cli.reference docs/commands.md

# Figures about the code itself: files, lines, docstrings, calls; to compare before and after a change.
metrics: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tools/code_metrics.py

# torch and torchvision come together from PyPI: a CPU wheel of the one beside the other does not import.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
