# Two commands do all the set-up on a bare machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CODE := src tests benchmarks examples

CHROMIUM := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
AS_ROOT := $(if $(filter-out 0,$(shell id -u)),sudo -n)

.PHONY: demo test test-long chromium check format docs clean

demo: $(INSTALLED)
	$(BIN)/longtail demo

test: $(INSTALLED) check
	$(BIN)/pytest -q -m "not long"

test-long: $(INSTALLED) chromium
	$(BIN)/pytest -q -m long -rs

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

# torch and torchvision come together from PyPI: a CPU wheel of the one beside the other does not import.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
