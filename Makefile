# Everything happens inside this folder: the virtual environment is .venv, runs go to runs/.
PYTHON ?= python3
BIN    := .venv/bin
SEED   ?= 0
PIP    := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt

.PHONY: train plot test test-long test-fast fuzz test-gpu bench-gpu docs check install install-dev clean

train: install  ## learn CartPole on the CPU and evaluate it
	$(BIN)/sharpwave train ppo --env CartPole-v1 --device cpu --seed $(SEED)

plot: install  ## draw the learning curves of everything in runs/
	$(BIN)/sharpwave plot runs

test: install-dev check  ## every test that needs no GPU, but for the longest
	$(BIN)/python -m pytest --numprocesses 2 -m "not long"

test-long: install-dev  ## the longest
	$(BIN)/python -m pytest --numprocesses 2 -m long

test-fast: install-dev  ## the tests that take under ten seconds each
	$(BIN)/python -m pytest --numprocesses 2 -m "not slow and not long"

fuzz: install-dev  ## ten minutes of random operations on each kind of replay buffer
	SHARPWAVE_FUZZ_SECONDS=600 $(BIN)/python -m pytest tests/replay/test_machine.py -k for_long --numprocesses 2

docs: install-dev  ## the site, into site/, its links checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: install-dev  ## formatting, lint, types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/ty check

# On a CUDA machine use the Python that holds its PyTorch: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
test-gpu:  ## the GPU tests, none skipped
	PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON) -m pytest -m gpu --require-gpu -rs

bench-gpu:  ## every table of benchmarks/, into benchmarks/results
	PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON) -m benchmarks

install: .venv/.installed
install-dev: .venv/.installed-dev

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.installed: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable .[plot]
	@touch $@

.venv/.installed-dev: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable .[dev]
	@touch $@ .venv/.installed

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
