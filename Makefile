# Every target works as the first command on a machine that has Python >= 3.10 and a C compiler.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

TORCH ?= 1
# Options for pytest, such as ARGS="-k limits -x".
ARGS ?=

BIN := .venv/bin
# Two workers for each processor, as tests often wait. Each runs a file at a time, in the order of tests/conftest.py;
# ARGS="-n 0" does without. The slowest are listed at the end.
WORKERS := $(shell echo $$(( 2 * $$(getconf _NPROCESSORS_ONLN) )))
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20 --durations-min=1
# Tests start hundreds of Python processes: none of them is to compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE
# The tests of what no server or client needs have a target, and a job, of their own.
TOOLS := tests/tools tests/bench
# What peers see of a server: it must be the same with a journal.
PEERS := tests/conformance tests/relay tests/interop tests/pytorch
STORE := $(addprefix --ignore=,$(TOOLS))
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
SOURCES := $(shell find tcpstore_async -name '*.py') pyproject.toml setup.py
COMPILED := $(CURDIR)/build/compiled

# Never a GPU build of PyTorch.
TORCH_VERSION := 2.13.0
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
ifeq ($(shell uname -sm),Linux x86_64)
TORCH_PACKAGE := torch==$(TORCH_VERSION)+cpu
else
TORCH_PACKAGE := torch==$(TORCH_VERSION)
endif

.PHONY: help
help:
	@echo "make demo      1,000 simulated ranks, 4 PyTorch and 8 plain processes find each other (TORCH=0: no PyTorch)"
	@echo "make test      the fast tests, which use PyTorch at most as a peer: under two minutes on two cores (ARGS='-k limits -x' goes to pytest)"
	@echo "make test-all  all tests, including those with PyTorch and its launchers, killed processes, examples, the benchmark"
	@echo "make test-tools  the tests of tcpstore_async/tools and bench, which nothing of the store imports"
	@echo "make test-exhaustive  more combinations of what test-all covers"
	@echo "make test-compiled  the tests of what compiling can change, on the compiled build"
	@echo "make simulate  random schedules of every kind, on the compiled build, and the planted defects: half an hour on two cores (SCALE=0.1: a tenth)"
	@echo "make test-persist  the tests of what peers see, with a journal for every server"
	@echo "make reliability  kills servers with a journal under load, 1,000 times: an hour on two cores (KILLS=100: a tenth)"
	@echo "make linear    checks that histories of calls are linearizable while faults of each kind happen: ten minutes (SECONDS=10: of each kind)"
	@echo "make soak      a server with a journal under load for an hour, ended now and then (MINUTES=20)"
	@echo "make etcd      fetches the etcds with which the log in etcd is tested, if ETCD=PATH names none"
	@echo "make etcd-api  makes the modules for etcd's API anew"
	@echo "make test-page the page in a real browser; installs Debian's Chromium if there is none (as root)"
	@echo "make check     what has to pass before a merge: lint, and all tests but those of the tools, most of them on both builds"
	@echo "make coverage  branch coverage of each module, compared with tests/coverage_minimums.json"
	@echo "make lint      format, lint, types"
	@echo "make format    format and sort imports"
	@echo "make bench     the scale benchmark: 1K to 96K ranks, every server, with figures; under an hour (ARGS=--help)"
	@echo "make bench-quick  the same with 1K to 8K ranks, most scenarios at one size, in under three minutes"
	@echo "make docs      build the documentation site in build/docs; a warning is an error"
	@echo "make compile   the compiled build, in build/compiled"
	@echo "make matrix    the tests with PyTorch against every PyTorch from 2.4 on (VERSIONS='2.4 2.8': only those; 25 GB)"
	@echo "make third-party  small jobs of accelerate, lightning, torchft and ray, on stock PyTorch and on ours (ARGS='ray --modes 1')"
	@echo "make pytorch-tests PYTORCH=/path/to/checkout  PyTorch's own tests of stores and launchers, on stock PyTorch and on ours"
	@echo "make clean     remove everything that was built, .venv too"

.PHONY: demo
demo: .venv/.package build/compiled/.made $(if $(filter 0,$(TORCH)),,.venv/.torch)
	@PYTHONPATH="$(COMPILED)" $(BIN)/python demo $(if $(filter 0,$(TORCH)),--torch 0)

# What the marks mean: pyproject.toml. Which folders have them: tests/conftest.py.
.PHONY: test test-all test-exhaustive test-tools
test: .venv/.test .venv/.torch
	TCPSTORE_TEST_BUILD=interpreted $(PYTEST) $(STORE) -m "not slow" $(ARGS)

test-tools: .venv/.test .venv/.torch
	TCPSTORE_TEST_BUILD=interpreted $(PYTEST) $(TOOLS) $(ARGS)

test-all: .venv/.test .venv/.torch
	TCPSTORE_TEST_BUILD=interpreted $(PYTEST) $(ARGS)

test-exhaustive: .venv/.test .venv/.torch
	TCPSTORE_TEST_BUILD=interpreted $(PYTEST) -m "exhaustive" $(ARGS)

# `pytest` and not `python -m pytest`, which would put the checkout before PYTHONPATH.
.PHONY: test-compiled
test-compiled: .venv/.test .venv/.torch build/compiled/.made
	TCPSTORE_TEST_BUILD=compiled PYTHONPATH="$(COMPILED)" $(PYTEST) $(STORE) -m "compiled" $(ARGS)

.PHONY: test-persist
test-persist: .venv/.test .venv/.torch
	TCPSTORE_TEST_PERSIST=process TCPSTORE_TEST_BUILD=interpreted $(PYTEST) $(PEERS) $(ARGS)

# A third with TLS and tokens, a third synced.
KILLS ?= 1000
.PHONY: reliability
reliability: .venv/.test build/compiled/.made
	PYTHONPATH="$(COMPILED)" $(BIN)/python tests/faults/kills.py --kills $$(( $(KILLS) / 3 )) --seed 1
	PYTHONPATH="$(COMPILED)" $(BIN)/python tests/faults/kills.py --kills $$(( $(KILLS) / 3 )) --seed 2 --sync always
	PYTHONPATH="$(COMPILED)" $(BIN)/python tests/faults/kills.py --kills $$(( $(KILLS) - $(KILLS) / 3 * 2 )) --seed 3 --secure
	PYTHONPATH="$(COMPILED)" $(BIN)/python tests/faults/kills.py --kills $$(( $(KILLS) / 10 )) --seed 4 --how replace

# Memory, disk and descriptors have to stay flat.
MINUTES ?= 60
.PHONY: soak
soak: .venv/.test build/compiled/.made
	PYTHONPATH="$(COMPILED):tests" $(BIN)/python tests/faults/soak.py --minutes $(MINUTES)

# What needs root is left out without it.
SECONDS ?= 60
.PHONY: linear
linear: .venv/.test build/compiled/.made
	@for kind in kill stop reset memory ioerror $$(! ls build/etcd/*/etcd >/dev/null 2>&1 || echo etcd) $$([ "$$(id -u)" != 0 ] || echo partition disk); do \
		PYTHONPATH="$(COMPILED)" $(BIN)/python tests/linear/histories.py --kind $$kind --seconds $(SECONDS) || failed=1; \
	done; exit $${failed:-0}
	PYTHONPATH="$(COMPILED)" $(BIN)/python tests/linear/histories.py --kind kill --seconds $(SECONDS) --sync always

# Any finding is an error, and so is a planted defect that is not found.
SCALE ?= 1
.PHONY: simulate
simulate: .venv/.test build/compiled/.made
	PYTHONPATH="$(COMPILED)" $(BIN)/python tests/simulation/run.py --scale $(SCALE)
	TCPSTORE_TEST_BUILD=interpreted $(PYTEST) tests/simulation/test_planted.py $(ARGS)

# What tests/log/test_etcd.py runs with: the system's, and on Debian that of its next release. Neither is installed, as
# that would start it. Without apt there is none.
APT := $(shell command -v apt-get)
CODENAME := $(shell . /etc/os-release 2>/dev/null; [ "$$ID" != debian ] || echo $$VERSION_CODENAME)
NEXT := -o Dir::Etc::sourcelist=$(CURDIR)/build/etcd/trixie/sources.list -o Dir::Etc::sourceparts=- \
	-o Dir::State::lists=$(CURDIR)/build/etcd/trixie/lists -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root

.PHONY: etcd
etcd: $(if $(APT),build/etcd/system/etcd $(if $(CODENAME),build/etcd/trixie/etcd))

build/etcd/system/etcd:
	@mkdir -p $(@D)
	@cd $(@D) && { apt-get download -qq etcd-server || { apt-get update -qq && apt-get download -qq etcd-server; }; }
	@dpkg -x $(@D)/etcd-server_*.deb $(@D)/unpacked && mv $(@D)/unpacked/usr/bin/etcd $@

build/etcd/trixie/etcd: build/etcd/system/etcd
	@mkdir -p $(@D)/lists/partial
	@echo "deb $$(apt-get indextargets --format '$$(REPO_URI)' 'Codename: $(CODENAME)' | head -1) trixie main" > $(@D)/sources.list
	@cd $(@D) && apt-get $(NEXT) update -qq && apt-get $(NEXT) download -qq etcd-server
	@dpkg -x $(@D)/etcd-server_*.deb $(@D)/unpacked && mv $(@D)/unpacked/usr/bin/etcd $@

# The modules that are made from etcd.proto by a compiler of protobuf 4.25, whose modules every later protobuf takes.
.PHONY: etcd-api
etcd-api: .venv/.made
	@$(PIP) --target build/etcd-api "grpcio-tools==1.62.3" "setuptools<81"
	PYTHONPATH=build/etcd-api $(BIN)/python -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. \
		tcpstore_async/log/etcd.proto

# make check runs these tests too where there is a Chromium.
CHROMIUM := /usr/bin/chromium

.PHONY: test-page
test-page: .venv/.test $(CHROMIUM)
	TCPSTORE_TEST_BUILD=interpreted $(BIN)/pytest tests/tools/web/test_page.py $(ARGS)

$(CHROMIUM):
	apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium

# Up to three tests that failed beside others are tried once more, alone: machines are shared. Both results are printed.
AGAIN := $(BIN)/python -c 'import json; assert 0 < len(json.load(open(".pytest_cache/v/cache/lastfailed"))) <= 3' && \
	echo "Trying what failed once more, alone." && $(BIN)/pytest -n 0 --last-failed

# What is slow or repeated runs on one build: the compiled one, if compiling can change it. One processor compiles while
# the other installs, lints and tests.
.PHONY: check
check: .venv/.made
	@rm -f .pytest_cache/v/cache/lastfailed
	@$(MAKE) build/compiled/.made & compiling=$$!; \
	$(MAKE) lint && { $(MAKE) test-all ARGS='$(STORE) -m "not (compiled and (slow or repeated))" $(ARGS)' || \
		{ export TCPSTORE_TEST_BUILD=interpreted; $(AGAIN); }; }; status=$$?; \
	wait $$compiling && exit $$status
	@$(MAKE) test-compiled || { export TCPSTORE_TEST_BUILD=compiled PYTHONPATH="$(COMPILED)"; $(AGAIN); }

# Coverage holds a lock while it begins with another file: a child forked at that moment hangs, and so does a process whose
# signal handler raises then. Such tests are `unmeasured`. MINIMUMS=--write takes what was measured as the new minimums.
.PHONY: coverage
coverage: .venv/.test .venv/.torch
	@mkdir -p build
	TCPSTORE_TEST_BUILD=interpreted $(PYTEST) -m "(not slow or measured) and not unmeasured" --cov --cov-report=term:skip-covered \
		--cov-report=json:build/coverage.json $(ARGS)
	$(BIN)/python tools/coverage_minimums.py build/coverage.json $(MINIMUMS)

.PHONY: lint
lint: .venv/.test .venv/.torch
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: format
format: .venv/.test
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: .venv/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "open build/docs/index.html"

.PHONY: compile
compile: build/compiled/.made

# The compiled build is found by itself; results are in bench-results, or where ARGS="--out FOLDER" says.
.PHONY: bench
bench: .venv/.bench .venv/.torch build/compiled/.made
	$(BIN)/python -m bench scale $(ARGS)

.PHONY: bench-quick
bench-quick: .venv/.bench .venv/.torch build/compiled/.made
	$(BIN)/python -m bench scale --quick $(ARGS)

# The environments stay in build/matrix, or $$MATRIX_DIR. Nothing of .venv is needed.
.PHONY: matrix
matrix: .venv/.made
	$(BIN)/python tools/matrix.py $(if $(VERSIONS),--versions $(VERSIONS))

# The environment stays in build/third-party. Nothing of .venv but Python is needed.
.PHONY: third-party
third-party: .venv/.made
	$(BIN)/python tools/third_party.py $(ARGS)

# In the environment of `make third-party`. The checkout is PyTorch's source, of the version there or near it.
.PHONY: pytorch-tests
pytorch-tests: .venv/.made
	@test -n "$(PYTORCH)" || { echo "PYTORCH=/path/to/checkout is needed: a checkout of PyTorch" >&2; exit 2; }
	$(BIN)/python tools/pytorch_tests.py "$(PYTORCH)" $(ARGS)

.PHONY: clean
clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find tcpstore_async tests demo bench -name __pycache__ -type d -prune -exec rm -rf {} +

# What is installed. The package is installed from the checkout, so that edits count at once, and never compiled.

.venv/.made:
	@for python in $$(which -a python3 2>/dev/null) python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
			echo "making .venv with $$($$python --version), $$python"; \
			$$python -m venv .venv && touch $@; \
			exit; \
		fi; \
	done; \
	echo "Python 3.10 or later is needed, and there is none." >&2; \
	exit 1

.venv/.package: .venv/.made pyproject.toml setup.py
	@echo "installing the package into .venv"
	@TCPSTORE_PURE=1 $(PIP) --editable .
	@touch $@

.venv/.test: .venv/.made pyproject.toml setup.py
	@echo "installing the package and the test tools into .venv"
	@TCPSTORE_PURE=1 $(PIP) --editable '.[test]'
	@touch .venv/.package $@

.venv/.bench: .venv/.package
	@echo "installing what draws figures into .venv"
	@TCPSTORE_PURE=1 $(PIP) --editable '.[bench]'
	@touch $@

.venv/.docs: .venv/.package
	@echo "installing what builds the documentation into .venv"
	@TCPSTORE_PURE=1 $(PIP) --editable '.[docs]'
	@touch $@

.venv/.torch: .venv/.made Makefile
	@echo "installing $(TORCH_PACKAGE) into .venv"
	@$(PIP) "$(TORCH_PACKAGE)" 2>/dev/null || $(PIP) --index-url $(TORCH_CPU_INDEX) "$(TORCH_PACKAGE)"
	@touch $@

# Compiled from a copy, so that the checkout holds nothing that could hide an edit. Without a C compiler this is plain
# Python too: `TCPSTORE_PURE=0 pip wheel --no-deps .` says why.
build/compiled/.made: .venv/.made $(SOURCES)
	@echo "compiling the package into build/compiled"
	@rm -rf build/source build/compiled
	@mkdir -p build/source
	@touch build/source/.begun
	@cp -R pyproject.toml setup.py README.md LICENSE tcpstore_async build/source
	@TCPSTORE_PURE= $(PIP) --no-deps --target build/compiled ./build/source
	@if command -v $${CC:-cc} >/dev/null && ! ls build/compiled/*.so >/dev/null 2>&1; then \
		echo "there is a C compiler, but nothing was compiled: TCPSTORE_PURE=0 pip wheel --no-deps . says why" >&2; \
		exit 1; \
	fi
	@touch -r build/source/.begun $@
