# The commands of the project; each installs what it needs first. Python 3.11, make and pip are enough.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo demo-control learning test matrix lint bench docs clean lock

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Where pip finds the CPU build of torch, when its configured indexes have none; other packages never come from there.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Of the demo.
SEED ?= 0

VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.txt
INSTALLED := $(VENV)/installed
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps

help:
	@echo 'setup  install the locked environment into $(VENV)'
	@echo 'demo   train a small model in three stages on virtual CPU devices, about 12 minutes; SEED=1 is another one'
	@echo 'demo-control  the PPO stage of the last demo again, with shuffled rewards'
	@echo 'learning  every algorithm on the task of the demo, three seeds each, some two hours; goes on where it was'
	@echo 'test   lint, types and all tests that need no GPU'
	@echo 'matrix every layout of the debug run on one recorded batch, and every family in live engines, about 15 minutes'
	@echo 'lint   lint, format check and types'
	@echo 'bench  run the benchmarks'
	@echo 'docs   write the pages of configuration fields and algorithms'
	@echo 'clean  remove outputs and caches, but not $(VENV)'
	@echo 'lock   resolve $(LOCK) again; UPGRADE=1 takes the newest versions'

setup: $(INSTALLED)

# A Python without ensurepip (Debian's) makes the environment without pip; its own pip then installs one there.
$(INSTALLED): $(LOCK) pyproject.toml
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
		echo "The lock is for Python 3.11 and '$(PYTHON)' is another one: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo 'Installing into $(VENV) (about two minutes)'
	@'$(PYTHON)' -m venv $(VENV) 2> /dev/null || { \
		'$(PYTHON)' -m venv --without-pip $(VENV) && '$(PYTHON)' -m pip --python $(BIN)/python install -qq pip; }
	@awk '/^[^ ]/ { keep = /^torch==/ } keep' $(LOCK) > $(VENV)/torch.txt
	@$(PIP_INSTALL) --require-hashes -r $(VENV)/torch.txt 2> $(VENV)/torch.log || \
		$(PIP_INSTALL) --require-hashes --extra-index-url '$(TORCH_INDEX)' -r $(VENV)/torch.txt || \
		{ cat $(VENV)/torch.log >&2; exit 1; }
	@$(PIP_INSTALL) --require-hashes -r $(LOCK)
	@$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

demo: setup
	$(BIN)/python -m megarl.demo --seed $(SEED)

demo-control: setup
	$(BIN)/python -m megarl.demo --control --seed $(SEED)

learning: setup
	$(BIN)/python -m benchmarks.learning --all
	$(BIN)/python -m benchmarks.learning --report

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright --pythonpath $(BIN)/python

test: lint
	$(BIN)/python -m pytest -m 'not gpu and not matrix'

matrix: setup
	$(BIN)/python -m pytest tests/e2e/test_layouts.py tests/rollout/test_families.py

bench: setup
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

docs: setup
	$(BIN)/python -m megarl.config.reference > docs/configuration.md
	$(BIN)/python -m megarl.algos.reference > docs/algorithms.md

clean:
	rm -rf runs build dist megarl.egg-info .pytest_cache .ruff_cache .hypothesis
	find megarl tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Keeps the versions that the lock has, unless UPGRADE=1. TORCH_INDEX= (empty) leaves the index of torch to uv's own settings.
lock: setup
	$(BIN)/uv pip compile --quiet pyproject.toml requirements/cpu.in --extra dev --extra launch \
		--override requirements/cpu.override --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --index-strategy unsafe-best-match) \
		$(if $(UPGRADE),--upgrade) --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
		--custom-compile-command 'make lock' --output-file $(LOCK)
