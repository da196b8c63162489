# groupstream. `make help` lists what there is; bare `make` is what CI runs.

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin
EXTRA  ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
DEMO   ?=
CHAOS  ?=
BENCH  ?=
HOSTILE ?=
TESTS  ?= tests/unit tests/integration tests/conformance

export TESTCONTAINERS_RYUK_DISABLED ?= true

.DEFAULT_GOAL := all
.PHONY: all demo test lint bench chaos hostile clean help

all: lint test  ## what CI runs first: lint, then every test

demo: $(VENV)/.installed  ## the whole line on this machine; settings: DEMO="seed=7 steps=20"
	@$(RUN)/groupstream demo $(DEMO)

test: $(VENV)/.installed  ## unit and integration tests, with a real Kafka
	@$(RUN)/pytest --numprocesses 2 --dist loadfile $(TESTS)

lint: $(VENV)/.installed  ## ruff, formatting, mypy --strict on schemas and the pure cores
	@$(RUN)/ruff check .
	@$(RUN)/ruff format --check .
	@$(RUN)/mypy

bench: $(VENV)/.installed  ## rows to groups, as ratios against raw Kafka; writes build/bench.json
	@$(RUN)/python -m tests.bench $(BENCH)

chaos: $(VENV)/.installed  ## faults for a minute, then an audit; CHAOS="short", "long", "seed=7 mode=network"
	@$(RUN)/python -m tests.chaos $(CHAOS)

hostile: $(VENV)/.installed  ## a million broken records against one assembler; HOSTILE="seed=7 rows=1000000"
	@$(RUN)/python -m tests.hostile $(HOSTILE)

clean:  ## removes the environment and everything that was built
	@rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

help:
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

$(VENV)/.installed: pyproject.toml requirements.lock infra/install.sh
	@PYTHON=$(PYTHON) EXTRA=$(EXTRA) infra/install.sh $(VENV)
	@touch $@
