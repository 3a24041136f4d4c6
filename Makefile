# Two lines are all a new machine needs: `make demo` trains a small model, `make test` runs the tests.
PYTHON ?= python3
# On a Linux machine with a GPU this is the CUDA build; any torch from 2.11 on works.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all check lint types imports install clean
.DEFAULT_GOAL := demo

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[numba]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

$(VENV)/.installed-all: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[lm-eval]"
	touch $@

demo: install
	$(BIN)/scrimp train --precision snip --optimizer.name muon --train.batch-tokens 2048 --train.steps 110

check:
	$(MAKE) --jobs=2 --output-sync lint types imports

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

imports: $(VENV)/.installed-dev
	$(BIN)/lint-imports

# Modules that were compiled once are kept, or each process that a test starts would compile them anew.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: check
	$(BIN)/pytest -m "not slow" -n 2 --dist worksteal

test-all: check $(VENV)/.installed-all
	$(BIN)/pytest -n 2 --dist worksteal --hypothesis-profile=all

clean:
	rm -rf $(VENV)
