# make serve: install into .venv, fetch the default model (or MODEL=NAME), serve it.   make test: the tests of every change, 15
# minutes on two quick cores, and how many it leaves to make test-rest, and why.   make test-all: both.   make soak: the long forms,
# hours.   JOBS=N: processes that run tests; three are for two cores, because tests of servers wait.
PYTHON ?= python3
PORT ?= 8000
MODEL ?= smollm2
JOBS ?= 3
# What is installed, by version and SHA-256 (scripts/make_lock.py). make serve LOCK=: what the package index has now, unchecked, for
# a platform that the lock does not know.
LOCK ?= requirements.lock
TEST_LOCK ?= requirements-test.lock
# What reads PDF, and images in requests; a machine that they cannot be installed on serves without.
PDF_LOCK ?= requirements-pdf.lock
IMAGES_LOCK ?= requirements-images.lock
BIN := .venv/bin
INSTALLED := .venv/.installed
TESTED := .venv/.test-installed
REFERENCE := .venv/.torch-installed
LOCKED := install --quiet --require-hashes --only-binary :all: --requirement
# One thread of BLAS and OpenMP in each process: theirs wait by spinning where cores are taken (a calibration beside another process took 160 s
# with two, 36 s with one).
# Where Python is told to write no bytecode, each process would compile what others have.
PYTEST := PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: serve test test-all test-rest test-cluster soak models lint types build wheel clean

# Kernels that the model needs first; the others beside, when nothing else wants the CPU, or on demand.
serve: $(INSTALLED)
	[ -e "$(MODEL)" ] || $(BIN)/zse pull $(MODEL)
	$(BIN)/python -m zse.build --model $(MODEL)
	($(BIN)/python -m zse.build --idle &); exec $(BIN)/zse serve $(MODEL) --port $(PORT)

test: $(TESTED) build models
	$(BIN)/python tests/prepare.py
	$(PYTEST)

test-all: test test-rest

# What `make test` leaves out (CONTRIBUTING.md says by which rules).
test-rest: $(REFERENCE) build
	$(BIN)/python tests/prepare.py --rest
	$(PYTEST) --exhaustive=only

# examples/ray_serve.py on a cluster of this machine, in an environment of its own: Ray is 230 MB.
test-cluster: build models
	[ -e .venv-cluster/.installed ] || { $(PYTHON) -m venv .venv-cluster && ZSE_BUILD_ISA=none .venv-cluster/bin/pip install --quiet \
		--editable '.[cluster]' psutil pytest && touch .venv-cluster/.installed; }
	.venv-cluster/bin/python -m pytest --exhaustive=only tests/cluster

# Floods, leaks and random walks, as long as tests/conftest.py's table SOAK says. One at a time: they watch memory and times.
soak: $(REFERENCE) build models
	$(BIN)/python -m pytest --soak --exhaustive=all tests/engine/test_deterministic.py tests/reliability tests/scheduler/test_simulator.py tests/formats/test_hostile.py \
		tests/http/test_disconnect.py tests/http/test_streams.py tests/server/test_isolation.py tests/server/test_kills.py \
		tests/server/test_overload.py tests/server/test_schema_examples.py tests/server/test_soak.py tests/kernels/test_gpu_resources.py \
		tests/test_wheel.py

# The models that tests need come with `zse pull`.
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

$(INSTALLED): pyproject.toml setup.py $(LOCK) $(PDF_LOCK) $(IMAGES_LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zse needs Python 3.11 or later: make $(MAKECMDGOALS) PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	@echo "installing the package and what it needs"
	@export ZSE_BUILD_ISA=none; if [ -n "$(LOCK)" ]; then \
		$(BIN)/pip $(LOCKED) $(LOCK) && $(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .; \
		else $(BIN)/pip install --quiet --editable '.[tokenizers]'; fi || { echo "the packages were not installed (pip says \
	why): check the network and its proxy, or set PIP_INDEX_URL or PIP_FIND_LINKS, and run the same command again; for a platform \
	that requirements.lock does not know, add LOCK="; exit 1; }
	@if [ -n "$(PDF_LOCK)" ]; then $(BIN)/pip $(LOCKED) $(PDF_LOCK) || echo "PDF documents will not be read: pypdfium2 was not installed"; fi
	@if [ -n "$(IMAGES_LOCK)" ]; then $(BIN)/pip $(LOCKED) $(IMAGES_LOCK) || echo "images will not be read: Pillow was not installed"; fi
	touch $@

$(TESTED): $(INSTALLED) $(TEST_LOCK)
	if [ -n "$(TEST_LOCK)" ]; then $(BIN)/pip $(LOCKED) $(TEST_LOCK); \
		else ZSE_BUILD_ISA=none $(BIN)/pip install --quiet --editable '.[pdf,images,test,reference,lint,otel]'; fi
	touch $@

# PyTorch makes references anew, which `make test-rest` alone does; `make test` compares with those of tests/models/*.npz. By version, not
# by hash: indexes have different wheels of one version (PyPI's needs 3 GB of CUDA, those of a CPU are +cpu). transformers is in the lock.
$(REFERENCE): $(TESTED)
	$(BIN)/pip install --quiet torch==2.13.0 || echo "torch cannot be installed: what is tested beside it skips"
	touch $@

# Wheels for other machines into dist/, all CPU levels in them: x86-64's (or this machine's), arm64's where there is a cross
# compiler, and with GPU_ARCHS="sm_90a sm_80" one with GPU kernels. The same tree, compiler and lock give the same bytes.
CROSS ?= aarch64-linux-gnu-gcc
wheel: $(INSTALLED)
	rm -rf dist build/lib* build/bdist*
	ZSE_BUILD_ISA=all $(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	! command -v $(CROSS) >/dev/null || \
		{ rm -rf build/lib* && ZSE_BUILD_MACHINE=arm64 CC=$(CROSS) $(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .; }
	[ -z "$(GPU_ARCHS)" ] || $(BIN)/python scripts/make_gpu_wheel.py $(GPU_ARCHS) --out dist
	ls -l dist

clean:
	rm -rf .venv .venv-cluster build src/zse/_native src/*.egg-info
