# Every target sets up .venv by itself, from hash-locked packages.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_WORKERS ?= auto
READY := $(VENV)/.ready

.PHONY: demo test check test-system test-gpu bench install lock clean setup
.DEFAULT_GOAL := test

setup: $(READY)

$(READY): requirements.lock .ci/build.lock pyproject.toml .ci/setup
	@PYTHON="$(PYTHON)" VENV="$(VENV)" .ci/setup
	@touch $@

demo: $(READY)
	@$(BIN)/python -m agent.app.demo --directory build/demo

test: $(READY)
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) -m "not system and not gpu" $(ARGS)

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@PYTHONPATH=. $(BIN)/lint-imports --no-cache

# The slow rings; as root. Three at a time, whatever the number of processors: much of it is waiting. What this machine lacks is skipped with the reason, and fails with AGENT_CI=1.
test-system: $(READY)
	@$(BIN)/python -m pytest -m system -n 3 --dist loadfile $(or $(ARGS),tests/system)

# On a host with GPUs on the driver nvidia and nothing on them, as root; elsewhere skipped with the reason.
test-gpu: $(READY)
	@$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

bench: $(READY)
	@$(BIN)/python -m tests.bench --out build/bench.json

# For a host: PREFIX, BINDIR and UNITDIR say where to.
install:
	@PYTHON="$(PYTHON)" .ci/install

# Renews requirements.lock, .ci/install.lock and .ci/build.lock; needs uv.
lock:
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --no-annotate \
	  --group dev -o requirements.lock pyproject.toml
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --no-annotate \
	  --group build -o .ci/build.lock pyproject.toml
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --no-annotate \
	  --extra p2p -o .ci/install.lock pyproject.toml

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
