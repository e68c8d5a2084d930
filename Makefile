# make serve: install into .venv, fetch the default model, serve it.   make test: the tests of every change, nine minutes
# on two cores.   make test-all: the tests that it leaves out as well.   JOBS=N: processes that run tests.
PYTHON ?= python3
PORT ?= 8000
JOBS ?= 2
BIN := .venv/bin
INSTALLED := .venv/.installed
TESTED := .venv/.test-installed
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: serve test test-all test-rest models lint types build wheel clean

serve: build
	$(BIN)/zse serve --port $(PORT)

test: $(TESTED) build models
	$(PYTEST)

test-all: test test-rest

# What `make test` leaves out.
test-rest: $(TESTED) build
	$(PYTEST) --exhaustive=only

# The models that tests need come with `zse pull`; torch and transformers are the reference where they can be installed.
models: $(TESTED)
	$(BIN)/zse pull smollm2 && $(BIN)/zse pull gemma3-270m || [ -z "$$ZSE_REQUIRE_MODELS" ]

lint: $(TESTED)
	$(BIN)/ruff check src tests benchmarks examples scripts setup.py
	$(BIN)/ruff format --check --quiet src tests benchmarks examples scripts setup.py

types: $(TESTED)
	$(BIN)/mypy

# The kernels of this CPU, with progress; what did not change is kept.
build: $(INSTALLED)
	$(BIN)/python -m zse.build

$(INSTALLED): pyproject.toml setup.py
	$(PYTHON) -m venv .venv
	@echo "installing the package and what it needs"
	ZSE_BUILD_ISA=none $(BIN)/pip install --quiet --editable .
	touch $@

$(TESTED): $(INSTALLED)
	ZSE_BUILD_ISA=none $(BIN)/pip install --quiet --editable '.[test,lint]'
	$(BIN)/pip install --quiet torch==2.13.0 && $(BIN)/pip install --quiet transformers \
		|| echo "torch or transformers cannot be installed: tests compare with the committed reference tensors"
	touch $@

# Wheels for other machines into dist/, all CPU levels in them: x86-64's (or this machine's), arm64's where there is a cross
# compiler, and with GPU_ARCHS="sm_90a sm_80" one with GPU kernels.
CROSS ?= aarch64-linux-gnu-gcc
wheel: $(INSTALLED)
	rm -rf dist build/lib* build/bdist*
	ZSE_BUILD_ISA=all $(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	! command -v $(CROSS) >/dev/null || \
		{ rm -rf build/lib* && ZSE_BUILD_MACHINE=arm64 CC=$(CROSS) $(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .; }
	[ -z "$(GPU_ARCHS)" ] || $(BIN)/python scripts/make_gpu_wheel.py $(GPU_ARCHS) --out dist
	ls -l dist

clean:
	rm -rf .venv build src/zse/_native src/*.egg-info
