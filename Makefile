# Recipes for working on kvactors. `make` lists them. They use the virtual environment in .venv
# (`make install` creates it); another one: `make test PYTHON=/path/to/python`.

PYTHON ?= .venv/bin/python
JOBS ?= 2
SEEDS ?= 200
CONSUMERS ?= ../consumers

# Folders of tests that run many caches or processes; `test-core` leaves them out.
SLOW = benchmarks chaos e2e interop oracle planted ranks scenario simulation soak

.PHONY: help install install-core test test-core test-native lint format types bench benchmarks docs docs-serve pages \
	dist simulate planted soak interop engines engines-full

help:  ## list the recipes
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */\1\t/' | expand -t 14

install:  ## create .venv with everything: tests, linters, docs (editable)
	python3 -m venv .venv
	.venv/bin/pip install -e '.[dev]'

install-core:  ## create .venv with what the unit tests need (editable; no Paddle, Mooncake, pyzmq)
	python3 -m venv .venv
	.venv/bin/pip install -e '.[test-core]'

test:  ## the whole suite
	$(PYTHON) -m pytest -n $(JOBS)

test-core:  ## unit tests that need only the extra `test-core`
	$(PYTHON) -m pytest -n $(JOBS) -m "not full" $(SLOW:%=--ignore=tests/%)

test-native:  ## the C++ tests under AddressSanitizer and UBSan
	cmake -S native -B build/native -DKVACTORS_TESTS=ON -DKVACTORS_PYTHON=OFF -DCMAKE_BUILD_TYPE=None
	cmake --build build/native --parallel $(JOBS)
	ctest --test-dir build/native --output-on-failure --no-tests=error

lint:  ## ruff: rules and format
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format:  ## let ruff fix and format
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

types:  ## mypy
	$(PYTHON) -m mypy

bench:  ## quick benchmarks of the index and of acquire
	$(PYTHON) -m tests.benchmarks index --quick
	$(PYTHON) -m tests.benchmarks acquire --quick

benchmarks:  ## every benchmark, and the tables of docs/benchmarks.md, with engines below CONSUMERS
	$(PYTHON) -m tests.benchmarks --write --vllm-python $(CONSUMERS)/vllm_cpu/bin/python \
		--sglang-python $(CONSUMERS)/sglang_cpu/bin/python \
		--lmcache-python $(CONSUMERS)/lmcache/bin/python

pages:  ## write the generated pages: messages, metrics, settings, command line, errors
	$(PYTHON) -m tests.docs.generators

docs:  ## build the documentation into build/site, with strict links
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

docs-serve:  ## serve the documentation on localhost
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs serve

dist:  ## sdist and wheels in dist/, checked and tried in clean environments
	$(PYTHON) -m tests.packaging.wheels dist

simulate:  ## SEEDS drawn systems in virtual time
	$(PYTHON) -m tests.simulation --seeds $(SEEDS)

planted:  ## every planted bug must be caught
	$(PYTHON) tests/planted/run.py

soak:  ## 100,000 requests through tiny caches
	$(PYTHON) -m tests.soak --requests 100000

interop:  ## the real consumers of KV events, in environments below CONSUMERS
	$(PYTHON) -m tests.interop.setup $(CONSUMERS) routers
	$(PYTHON) -m pytest tests/interop -m interop --interop=$(CONSUMERS)

engines:  ## kvactors inside real engines, in environments below CONSUMERS
	$(PYTHON) -m tests.interop.setup $(CONSUMERS) engines
	$(PYTHON) -m pytest tests/interop -m engines --interop=$(CONSUMERS)

engines-full:  ## every case inside real engines, an hour on two cores
	$(PYTHON) -m tests.interop.setup $(CONSUMERS) engines routers
	$(PYTHON) -m pytest tests/interop -m "engines or engines_full" --interop=$(CONSUMERS)
