# The four commands, the same on a laptop and in CI (see README.md).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SERVE_STAMP := $(VENV)/.installed-to-serve
SMOKE_PYTHON ?= python3.12
SMOKE_VENV   ?= .venv-smoke

.PHONY: setup check test smoke serve clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

# A part of the suite on another Python with the newest jax: `make smoke SMOKE_PYTHON=python3.12`.
smoke: $(SMOKE_VENV)/.installed
	$(SMOKE_VENV)/bin/python -m pytest tests/test_kernels.py tests/test_tree.py tests/test_verify.py tests/test_step.py

$(SMOKE_VENV)/.installed: pyproject.toml
	@test -x $(SMOKE_VENV)/bin/python || $(SMOKE_PYTHON) -m venv $(SMOKE_VENV)
	$(SMOKE_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(SMOKE_VENV)/bin/python -m pip install --quiet --editable '.[smoke]'
	@touch $@

# Without the tools of `make setup` (torch, for one, is only compared with). Flags: make serve SERVE_FLAGS='--port 8000'
serve: $(SERVE_STAMP)
	@$(BIN)/python -m specjax.serve --config configs/smollm2-135m-instruct-ngram.toml $(SERVE_FLAGS)

$(SERVE_STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --progress-bar on --editable .
	@touch $@

clean:
	rm -rf $(VENV) $(SMOKE_VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
