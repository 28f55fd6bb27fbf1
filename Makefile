# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
# PYTHON=python3.11 forces an interpreter (its environment is .venv-python3.11); EXTRAS=dev,cuda adds extras.
PYTHON ?=
comma := ,
EXTRAS ?= dev
VENV ?= .venv$(if $(PYTHON),-$(notdir $(PYTHON)))
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
# One process a core; a file's tests stay together, so that they share what they compiled.
PYTEST := nice $(PY) -m pytest -q -n auto --maxprocesses=8 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := venv
.PHONY: venv quickstart smollm2 test fast fuzz lint format

venv: $(STAMP)
	@echo "ready: $(VENV); next: make quickstart, or make test"

$(STAMP): setup.py pyproject.toml .ci/venv
	@bash .ci/venv "$(VENV)" "$(EXTRAS)" "$(PYTHON)"
	@touch $@

quickstart: $(STAMP)
	@$(PY) -m rl_jax.launch

smollm2: .cache/smollm2

.cache/smollm2: | $(STAMP)
	@$(PY) -m rl_jax.tools.fetch_smollm2 $@

# What the tests of a real model need: without a network they are skipped, and the rest runs.
define FETCH
@test -e "$${RL_JAX_SMOLLM2:-.cache/smollm2}" || $(PY) -m rl_jax.tools.fetch_smollm2 .cache/smollm2 || \
	echo "SmolLM2 could not be fetched: its tests are skipped; make smollm2 tries again"
endef

# Programs are compiled fast and run slowly (tests/conftest.py), but for a second run of what is about bits.
test: $(STAMP)
	$(FETCH)
	$(PYTEST) -m "not accelerator"
	XLA_FLAGS="$$XLA_FLAGS --xla_backend_optimization_level=3" $(PYTEST) -m bits

fast: $(STAMP)
	$(PYTEST) -m "not slow and not accelerator"

# 10,000 cases against the HTTP interface; the figures go to benchmarks/results.
fuzz: $(STAMP)
	$(PY) -m benchmarks.http_fuzz

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyrefly check --python-interpreter-path $(PY) --min-severity error

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
