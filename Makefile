# Two commands: `make run` trains the quick-start suite and shows its page, `make test` checks everything.
PYTHON ?= python3
WORKERS ?= 2
CLUSTER ?= cluster
VENV := .venv
BIN := $(VENV)/bin
CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt

.PHONY: run test test-frameworks test-adversary test-cluster test-servers test-versions lint clean help

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

run: $(VENV)/.run  ## Install what is needed, train the quick-start suite, show its page
	@$(BIN)/accelmark run quickstart

test: $(VENV)/.test lint  ## Install what tests need; run lint and all tests but the heavy ones (8 to 26 minutes on two cores)
	# Processes of their own: the thread pools of inference runtimes disturb other tests in the same process.
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not heavy' tests/infer
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not heavy and not cluster' --ignore tests/infer

test-frameworks: $(VENV)/.test  ## Run all tests of training, frameworks, trainers and cases, the heavy ones too
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/frameworks tests/train tests/external tests/cases tests/benchmarks

test-adversary: $(VENV)/.test  ## Run all attacks and honest variants (docs/adversary.md)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m adversary tests

test-cluster: $(VENV)/.test-cluster  ## Install sshd, podman, docker, Slurm and test launching on namespace hosts (root)
	$(BIN)/python -m pytest -m '$(CLUSTER)' tests/cluster

test-servers: $(VENV)/.test-servers  ## Build llama.cpp; run all tests of generation and serving, the heavy ones too
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/serving tests/infer/test_generation.py

test-versions: $(VENV)/.test-cluster  ## Run cases, SSH hosts and a container on Python 3.9, 3.10, 3.12 with PyTorch 2.4, 2.6, 2.8
	$(BIN)/python -m benchmarks.versions

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports & contracts=$$!; $(BIN)/mypy --num-workers 2 && wait $$contracts

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'AccelMark needs Python 3.11 or newer; name one with PYTHON=...'; exit 2; }
	@echo 'Making the virtual environment'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo 'Installing AccelMark with PyTorch (once)'
	@# Without an NVIDIA GPU PyTorch's build for CPUs, 0.7 GB in place of 5.8 GB, if its index can be reached.
	@set -- '.[torch,nvidia]'; \
	test -e /dev/nvidiactl || ! $(BIN)/python -c 'import urllib.request as r; r.urlopen("$(CPU_INDEX)/torch/", timeout=5)' 2>/dev/null || \
	    set -- '.[torch]' --extra-index-url $(CPU_INDEX); \
	$(PIP) --editable "$$@"
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt tests/requirements.sh | $(VENV)/bin/python
	@echo 'Installing what the tests need (once)'
	@$(PIP) --quiet --editable '.[dev]'
	@bash tests/requirements.sh
	@touch $@ $(VENV)/.run

$(VENV)/.test-cluster: $(VENV)/.test tests/cluster/requirements.sh
	@bash tests/cluster/requirements.sh
	@touch $@

$(VENV)/.test-servers: $(VENV)/.test
	@echo 'Building llama.cpp (minutes)'
	@$(PIP) --quiet --editable '.[llama-cpp]'
	@touch $@

clean:  ## Remove the virtual environments and caches; runs/ stays
	rm -rf $(VENV) .environments .mypy_cache .ruff_cache .pytest_cache
