# `make help` lists what there is.  Everything runs on a CPU; the first run installs about 11 GB once per machine.
PYTHON ?= python3
PY := .venv/bin/python
BENCHES := $(subst _,-,$(patsubst bench/%.py,bench-%,$(wildcard bench/*.py)))

.DEFAULT_GOAL := help
.PHONY: help env model demo test lint format $(BENCHES)

help:
	@echo 'make demo          serve 8 long chats in a memory too small for full KV, and check every answer'
	@echo 'make test          lint, types and all tests'
	@echo 'make lint          ruff and pyright alone'
	@echo 'make format        let ruff rewrite what it can'
	@echo 'make env           only make the Python environment'
	@echo 'make model         only make the model that tests, demo and benchmarks use'
	@$(foreach bench,$(BENCHES),echo 'make $(bench)';)
	@echo
	@echo 'PYTHON=python3.12  another interpreter (3.11 or newer)'
	@echo 'KVIR_HOME=DIR      where environments and models live (~/.cache/kvir)'

env:
	@$(PYTHON) tools/env.py

model: env
	@$(PY) -m evaluation.models smollm2

demo: model
	@$(PY) -m demo.run

lint: env
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m pyright --pythonpath $(PY)

format: env
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

test: lint model
	$(PY) -m pytest

$(BENCHES): bench-%: model
	$(PY) -m bench.$(subst -,_,$*) $(PARTS)
