# Everything happens in .venv, which is made on first use; only pip's downloads leave this folder.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help decode test check bench soak clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 18

decode: $(VENV)/.run  ## decode with all orchestrations available; ARGS="--ranks 8 --model DIR" and others go to mla-fx decode
	$(BIN)/mla-fx decode $(ARGS)

test: $(VENV)/.test  ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

check: $(VENV)/.dev  ## linter, formatter, strict type checker, packaging test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m packaging --packaging tests/test_packaging.py

bench: $(VENV)/.test  ## overhead and speed, as ratios within one run
	$(BIN)/python -m pytest tests/benchmarks --benchmark-only $(ARGS)

soak: $(VENV)/.test  ## long random runs of the law and of the merged result
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m soak --soak $(ARGS)

clean:  ## remove .venv and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .benchmarks

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "mla_fx needs Python 3.11 or newer; name one with make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "no venv: install your system's python3-venv package"; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.run: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --editable '.[test,dev]'
	@touch $@
