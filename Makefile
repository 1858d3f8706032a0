# spmdkit: `make` lists the targets. Needs make and Python 3.11 or newer; installs everything else into $(VENV).
PYTHON ?= $(PYTHONS)
PYTHONS := python3.13 python3.12 python3.11 python3 python
VENV ?= .venv
CONFIG ?= quickstart
ARGS ?=
WORKERS ?= 2
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt

# Tests start many processes, which start faster with compiled modules.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install train test test-quick test-equivalence test-long test-libraries test-faults test-cluster test-targets lint format bench figures docs docs-serve clean

help:  ## list the targets
	@echo "make TARGET [PYTHON=python3.12] [ARGS=\"...\"]"
	@sed -n 's/^\([a-z-]*\):.*##\(.*\)$$/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F '|' '{ printf "%-18s%s\n", $$1, $$2 }'

install: $(VENV)/.dev  ## install spmdkit with the tools for tests and lint; the targets below do this as needed

train: $(VENV)/.spmdkit  ## train the quickstart on 8 simulated devices; CONFIG= selects another config, ARGS="train.steps=50" overrides keys
	$(BIN)/spmdkit train $(CONFIG) $(ARGS)

test: $(VENV)/.test  ## run the test suite; ARGS= are passed to pytest, WORKERS=2 sets the processes
	$(PYTEST) -m "not long and not table and not faults and not cluster and not targets and not libraries" $(ARGS)

test-equivalence: $(VENV)/.test  ## compare every strategy and product with one device, in float64 and float32: 8 minutes
	$(PYTEST) -m table tests/parallel/test_equivalence.py $(ARGS)

test-quick: $(VENV)/.test  ## run the tests that are neither slow nor multiprocess: 2 minutes
	$(PYTEST) -m "not slow and not multiprocess and not long and not table and not faults and not cluster and not targets and not libraries" $(ARGS)

test-long: $(VENV)/.test  ## run the tests marked long, which `make test` leaves out: 12 minutes
	$(PYTEST) -m "long and not faults" $(ARGS)

test-libraries: $(VENV)/.test  ## compare weights, plans, loaders and logs with torch, transformers, tensorflow, datasets, MLflow and W&B (installs 2 GB)
	@$(INSTALL) 'torch==2.13.0' 'transformers>=5' tensorflow-cpu datasets mlflow-skinny wandb
	$(PYTEST) -m libraries $(ARGS)

test-faults: $(VENV)/.test  ## inject faults into real runs and check the documented behavior: 30 minutes
	$(PYTEST) -m faults $(ARGS)

test-targets: $(VENV)/.test  ## compile steps for GPUs and TPUs that are not here, and check the programs (installs 1.4 GB)
	@test -d build/targets || $(INSTALL) --no-deps --target build/targets \
		jax-cuda13-plugin==$$($(BIN)/python -c 'import jax; print(jax.__version__)') \
		jax-cuda13-pjrt==$$($(BIN)/python -c 'import jax; print(jax.__version__)') nvidia-cuda-nvcc nvidia-nvvm
	@test -d build/targets/libtpu || $(INSTALL) --no-deps --target build/targets \
		"$$($(BIN)/python -c 'from importlib.metadata import requires; print(next(each.partition(";")[0] for each in requires("jax") if each.startswith("libtpu")))')"
	PYTHONPATH=$(CURDIR)/build/targets $(BIN)/python -m pytest -m targets $(ARGS)

test-cluster: $(VENV)/.test  ## train on a real Slurm, Open MPI and SSH server, installed from Debian (as root)
	tests/cluster/install
	$(BIN)/python -m pytest -m cluster tests/cluster $(ARGS)

lint: $(VENV)/.dev  ## check style (ruff) and types (pyright)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.spmdkit  ## compare our step with hand-written JAX in one run; ARGS= are passed to the benchmark
	$(BIN)/python benchmarks/compare.py $(ARGS)

figures: $(VENV)/.spmdkit  ## regenerate the outputs and pictures in README and docs/; ARGS=--slow includes the slow ones
	$(BIN)/python docs/figures.py $(ARGS)

docs: $(VENV)/.docs  ## build the documentation site into build/site; downloads nothing
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open build/site/index.html, or run: make docs-serve"

docs-serve: $(VENV)/.docs  ## serve the documentation on http://127.0.0.1:8000 while you write; ARGS= are passed to mkdocs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve $(ARGS)

clean:  ## remove the virtual environment, caches and build outputs, but not runs/
	rm -rf $(VENV) .venv-newest .cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp files are older than the pins or the project's metadata if something must be installed.
$(VENV)/.spmdkit: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing spmdkit into $(VENV) ..."
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing spmdkit and its documentation tools into $(VENV) ..."
	@$(INSTALL) --editable '.[docs]'
	@touch $@ $(VENV)/.spmdkit

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing spmdkit and its test tools into $(VENV) ..."
	@$(INSTALL) --editable '.[test]'
	@touch $@ $(VENV)/.docs $(VENV)/.spmdkit

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing spmdkit and its development tools into $(VENV) ..."
	@$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.test $(VENV)/.docs $(VENV)/.spmdkit

# Uses the first interpreter that runs, is new enough, and can create a virtual environment with pip.
CAN_BUILD := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

$(BIN)/python:
	@for python in $(PYTHON); do \
		"$$python" -c '$(CAN_BUILD)' >/dev/null 2>&1 || continue; \
		echo "Creating $(VENV) with $$python ($$("$$python" -c 'import platform; print(platform.python_version())')) ..."; \
		"$$python" -m venv $(VENV) && exit 0; \
		rm -rf $(VENV); exit 1; \
	done; \
	echo "spmdkit needs Python 3.11 or newer, with the venv and ensurepip modules. Tried: $(PYTHON)." >&2; \
	echo "Found: $$(command -v python3 || echo 'no python3') ($$(python3 --version 2>&1))." >&2; \
	echo "Install one (Debian, Ubuntu: apt-get install python3 python3-venv; macOS: brew install python)," >&2; \
	echo "or select one: make PYTHON=/path/to/python3.12 ..." >&2; \
	exit 1
