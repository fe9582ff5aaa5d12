# Every target makes or updates .venv first, which takes no time when it is current.
SHELL := /bin/bash
BIN := .venv/bin
# Tests run on CPUs. Where there are devices, or the set for them was asked for, they have an environment
# of their own for that.
DEVICE_FILES := /dev/nvidia[0-9]*
CHOSEN_SET := .venv/setup.device
TEST_VENV := $(if $(and $(wildcard $(DEVICE_FILES))$(filter gpu,$(shell cat $(CHOSEN_SET) 2>/dev/null)),$(filter-out cpu,$(or $(DEVICE),gpu))),.venv-cpu,.venv)
SOURCES := async_grpo tests sample-data tools $(wildcard *.py) $(wildcard benchmarks)
# Modules are searched for doctests too. Four files at a time, on two cores: a cluster that starts
# is mostly waiting. In the order of tests/conftest.py, not by the number of a file's tests.
PYTEST := $(TEST_VENV)/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder \
	tests async_grpo sample-data benchmarks

.DEFAULT_GOAL := help
.PHONY: help setup dev dev-tests quickstart test test-fast test-all test-original test-others test-rotation lint types imports house docs benchmarks guard

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## .venv with everything that a run needs (PYTHON=..., DEVICE=cpu|gpu)
	@PYTHON="$(PYTHON)" DEVICE="$(DEVICE)" tools/setup_env.sh

dev: ## .venv with the tools of tests and lint too
	@PYTHON="$(PYTHON)" DEVICE="$(DEVICE)" tools/setup_env.sh dev

dev-tests: # what the tests run in
	@VENV=$(TEST_VENV) PYTHON="$(PYTHON)" DEVICE="$(if $(filter %-cpu,$(TEST_VENV)),cpu,$(DEVICE))" \
		tools/setup_env.sh dev

quickstart: setup ## watch a tiny model learn arithmetic puzzles (ARGS="--seed 1")
	@$(BIN)/async-grpo quickstart $(ARGS)

# Tests never ask a model hub, and share the cores: a thread each is fastest.
test test-fast test-original test-others test-rotation test-all: export HF_HUB_OFFLINE = 1
test test-fast test-original test-others test-rotation test-all: export OMP_NUM_THREADS = 1
ifeq ($(TEST_VENV),.venv-cpu)
test test-fast test-original test-others test-rotation test-all: export CUDA_VISIBLE_DEVICES =
endif
# Hundreds of processes import the package: each would compile it anew.
unexport PYTHONDONTWRITEBYTECODE

test: dev-tests ## all tests but those that are slow or need a GPU
	$(PYTEST) -m "not gpu and not slow"

test-fast: dev-tests ## tests that start no Ray, vLLM or second process
	$(PYTEST) -m "not gpu and not integration and not slow"

test-original: dev-tests ## the command blocks of the original async-grpo's README, as they stand
	$(TEST_VENV)/bin/python -m pytest tests/integration/test_original_readme.py

# Not in `make test`: each has a Python of its own, which takes minutes to make.
OTHERS := $(CURDIR)/.venv-others
test-others: export ASYNC_GRPO_VERIFIERS_PYTHON = $(OTHERS)/verifiers/bin/python
test-others: export ASYNC_GRPO_OPENENV_PYTHON = $(OTHERS)/openenv/bin/python
test-others: export ASYNC_GRPO_AGENTS_PYTHON = $(OTHERS)/agents/bin/python
test-others: dev-tests ## verifiers, OpenEnv, stock agents, W&B and MLflow themselves
	@tools/setup_others.sh verifiers openenv agents trackers
	$(TEST_VENV)/bin/python -m pytest tests/bridges
	$(OTHERS)/trackers/bin/python -m pytest tests/telemetry/test_real_trackers.py

test-rotation: dev-tests ## a tenth of the slow tests, by the commit, in 40 minutes (ARGS="--tenth 3")
	$(TEST_VENV)/bin/python tools/rotation.py $(ARGS)

test-all: export PROOFS = full
test-all: dev-tests ## all tests with the proofs in full: 10,000 histories, 4 ranks, 50 updates
	$(PYTEST) -o timeout=3600

lint: dev ## style and format, and the form of the workflows
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml

types: dev ## type annotations
	$(BIN)/mypy

imports: dev ## who may import whom
	$(BIN)/lint-imports

house: dev ## how large the package is, and what is over its budget (ARGS=--slivers, --arrows)
	$(BIN)/python tools/house.py $(or $(ARGS),--check)

docs: export NO_MKDOCS_2_WARNING = 1
docs: dev ## the site, in build/site; every warning is an error (ARGS=serve shows it while you write)
	$(BIN)/mkdocs $(or $(ARGS),build --strict)

benchmarks: dev ## every benchmark, to benchmarks/results; some hours (ARGS="--quick packing")
	$(BIN)/python -m benchmarks $(ARGS)

guard: dev ## whether benchmarks have their files, and a ratio got worse than on file (ARGS="packing")
	$(BIN)/python -m benchmarks.guard $(ARGS)
