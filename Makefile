# Every command of the project. "make" alone lists them; CI runs nothing else.

# The repository root must not be on sys.path: a folder "kernels" there would look like the package
# of that name, which transformers probes for.
export PYTHONSAFEPATH := 1

PYTHON ?=
JOBS ?= 2
TESTS ?= tests
MODEL ?= models/smollm2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.DEFAULT_GOAL := help
.PHONY: help setup fix check test test-slow test-gpu bench bench-kernels docs build demo clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

setup: $(STAMP) ## make .venv and install the project and its tools into it

$(STAMP): pyproject.toml constraints.txt scripts/make_venv.sh
	@PYTHON="$(PYTHON)" sh scripts/make_venv.sh $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

fix: $(STAMP) ## format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: $(STAMP) ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: $(STAMP) ## the test suite, without the long state machines
	$(BIN)/python -m pytest -n $(JOBS) -m 'not slow' $(TESTS)

test-slow: $(STAMP) ## the long tests alone
	$(BIN)/python -m pytest -n $(JOBS) -m slow $(TESTS)

test-gpu: $(STAMP) ## the tests that need a CUDA device; fails where there is none
	$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("error: no CUDA device")'
	$(BIN)/python -m pytest -m gpu $(TESTS)

bench: $(STAMP) ## quality and cost of the methods on MODEL, on this machine
	$(BIN)/python benchmarks/quality.py $(MODEL) --run rtn --run awq --run awq_gptq --output quality.json

bench-kernels: $(STAMP) ## time of the kernels beside other projects', on this GPU
	$(BIN)/python benchmarks/kernels.py --output kernels.json

docs: $(STAMP) ## write the parts of docs/ that are made from the code
	$(BIN)/python scripts/build_reference.py

build: $(STAMP) ## sdist and wheel in dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

demo: $(STAMP) ## import, quantize, judge and serve a small model: the whole path, no GPU needed
	$(BIN)/python scripts/demo.py

clean: ## remove .venv, .cache and build outputs; models/ stays
	rm -rf $(VENV) .cache build dist
