# The four commands, the same on a laptop and in CI (see README.md).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
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

# The server is not built yet: until then the main job is to complete prompts with the built-in model.
serve: setup
	$(BIN)/python -m specjax.generate --input examples/prompts.jsonl --output /dev/stdout --max-new-tokens 96

clean:
	rm -rf $(VENV) $(SMOKE_VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
