# `make train` and `make test` from a bare clone: Python >= 3.11 and make are all that they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/tiny.py
# On a machine with an NVIDIA GPU: requirements-gpu.txt.
REQUIREMENTS ?= requirements.txt
# Python compiles what it imports; pip would compile all of PyTorch and transformers.
export PIP_NO_COMPILE = 1
PYTEST = $(BIN)/python -m pytest --numprocesses=2 --dist=worksteal

.PHONY: train test test-all pytest lint reproduce clean

train: $(VENV)/installed
	$(BIN)/python -m sparse_lm.train --config=$(CONFIG)

# All but the long tests, in minutes.
test: $(VENV)/installed
	$(PYTEST) -m "not long" $(TESTS)

# All tests but slow ones, which compile kernels for more GPUs: python -m pytest -m slow.
test-all: $(VENV)/test-installed pytest

# The same with what is installed: without PyTorch, transformers or Triton the tests that need them are skipped.
pytest: $(VENV)/installed
	$(PYTEST) $(TESTS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# How the README's numbers are measured again: commands, GPUs, expected values.
reproduce: $(VENV)/installed
	$(BIN)/python -m experiments.reproduce

$(VENV)/installed: $(REQUIREMENTS) requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sparse_lm needs Python >= 3.11; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r $(REQUIREMENTS) -r requirements-dev.txt
	touch $@

# Triton after the rest, by itself: a CUDA build of PyTorch asks for another version, which the tests do not need.
$(VENV)/test-installed: requirements-test.txt requirements-triton.txt $(VENV)/installed
	$(BIN)/python -m pip install --quiet -r requirements-test.txt
	$(BIN)/python -m pip install --quiet -r requirements-triton.txt
	touch $@

# Runs and prepared data stay.
clean:
	rm -rf .venv .venv-3.12
