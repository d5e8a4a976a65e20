# Two commands do everything on a fresh machine (Python >= 3.11, a C++ compiler, make):
#   make demo   a real model answers
#   make test   linters, type checks, tests
# `make prove` runs the longer proofs, `make certify` what takes longer still (not in CI).

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Tests run in parallel processes: one thread each keeps two cores from fighting over one another's work.
WORKERS ?= 2
# The seed of the proofs comes from the commit, so that CI can't fail by chance on a rerun.
SEED := $(shell printf '%d' 0x$$(git rev-parse --short=7 HEAD 2>/dev/null || echo 0))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TEST_SEED := $(SEED)

JAX    := $(VENV)-jax

.PHONY: jax api-snapshot demo test lint types unit prove certify models env clean

demo: models
	$(BIN)/octavo generate --model smollm2 --prompt "What is the capital of France?" --temperature 0 --max-tokens 64

env: $(VENV)/.ready

# torch first and with plain pip: everything that depends on it then finds it there.
$(VENV)/.ready: pyproject.toml setup.py core/kv_cache/csrc/chain.c constraints.txt contrib/pyaccel/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch numpy
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-deps -e contrib/pyaccel
	touch $@

# JAX in an environment of its own, on top of the first one's packages, for tests/contrib/test_jax_reference.py.
jax: $(JAX)/.ready

$(JAX)/.ready: $(VENV)/.ready contrib/jax_reference/pyproject.toml contrib/jax_reference/base_packages.py
	$(BIN)/python -m venv $(JAX)
	$(JAX)/bin/python contrib/jax_reference/base_packages.py $(VENV)
	$(JAX)/bin/pip install -q -c constraints.txt -e contrib/jax_reference
	touch $@

models: env
	$(BIN)/octavo models pull smollm2

test: models lint types unit

lint: env
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache

types: env
	$(BIN)/mypy -p octavo

# Takes the current octavo.api in as what plugins may rely on, once CHANGELOG.md names what has changed.
api-snapshot: env
	$(BIN)/python tests/api/api_surface.py

unit: models jax
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not prove" \
	  --cov=octavo.core --cov-report=term:skip-covered --cov-fail-under=90

prove: models
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m prove -p no:cacheprovider

# 100,000 examples of the scheduler's state machine, recorded in long.json: most of an hour. It goes on where it was interrupted.
certify: env
	OMP_NUM_THREADS=1 $(BIN)/python tests/core/scheduling/long_run.py --long --out long.json

clean:
	rm -rf $(VENV) $(JAX) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage
