# Three commands set everything up: `make demo`, `make quick` and `make test`. `make help` lists the rest.
PYTHON ?= python3.11
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# With `COVERAGE=1` the unit tests also say what they cover; they take a third more time.
COVER := $(if $(COVERAGE),--cov=controlplane --cov=dataplane --cov=tokenfleet --cov-report=)
# Of the long tests each commit runs a tenth, which its name picks: else two cores need three quarters of an hour.
PART ?= $(shell echo $$(( 0x0$$(git rev-parse --short=7 HEAD 2> /dev/null) % 10 + 1 )))
DAILY := -m 'not nightly' $(if $(filter all,$(PART)),,--part $(PART))
# The start of engines counts, too, and takes minutes where two fleets start at once.
LIVE := --dist loadscope --no-loadscope-reorder --timeout 900 tests/live
# Files in the order of tests/conftest.py: the longest first.
FILES := --dist loadfile --no-loadscope-reorder
PINS := -c requirements/live-cpu.txt -c requirements/dev.txt
# Also where the environment tells Python to keep no compiled modules: each process of a fleet would compile
# thousands anew.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo quick test nightly check pure unit live kernels pack-kernels serve-demo gpu-day wheel release docs reference clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

demo: .venv/base  ## set up, plan a fleet for the sample trace, write the report
	$(BIN)/tokenfleet plan --trace examples/sample_trace.csv --model llama-3.1-70b \
	  --gpu a100 --gpu h100 --gpu h200 --slo ttft=1.6s,tpot=75ms --output-dir tokenfleet-out/demo

quick:  ## checks, and all tests that need no engine: no vLLM, torch or Ray is installed
	$(MAKE) --jobs 2 --output-sync=target check pure

# What has one process runs beside something else, so that both cores have work: checks beside the installation.
test:  ## set up everything, run all checks, and all tests but those of `nightly`; PART=all: every long one
	$(MAKE) --jobs 2 --output-sync=line .venv/all kernels check
	$(MAKE) unit
	$(MAKE) live
	@echo "Of the long tests, part $(PART) of 10 ran. PART=1 to 10 or all picks another."

check: .venv/dev  ## ruff, mypy, import-linter, the bars of benchmarks/structure.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python benchmarks/structure.py

# They are compiled while the tools of `check` are installed and run, and all tests share them.
kernels: .venv/base
	$(BIN)/python -m tokenfleet simulate --trace examples/sample_trace.csv --model llama-3.1-8b --gpu h100 --tp 1 \
	  --workers 2 --slo ttft=1s,tpot=50ms --window 0s..10s > /dev/null

# Where sources of kernels have changed, this compiles them for every CPU. Commit the archive.
pack-kernels: .venv/base  ## deploy/kernels-*.tar.xz: the compiled simulator, for the Pythons found and this architecture
	$(BIN)/python deploy/ship_kernels.py

pure: .venv/dev kernels
	$(BIN)/pytest -n 2 $(FILES) $(DAILY) --ignore tests/live --ignore tests/rehearsal --durations 10

unit: .venv/all kernels  ## tests that start no engine, with vLLM where they can use it
	$(BIN)/pytest -n 2 $(FILES) $(DAILY) --ignore tests/live --durations 10 $(COVER)
	$(if $(COVERAGE),@echo "unit tests cover $$($(BIN)/coverage report --format=total) % of the lines")

live: .venv/all  ## tests on real vLLM engines, Ray and servers; vLLM's GPU-side choices, without a GPU
	$(BIN)/pytest -n 2 $(DAILY) tests/rehearsal
	timeout -k 30 2700 $(BIN)/pytest -n 2 $(DAILY) $(LIVE) --durations 10

nightly: .venv/all kernels  ## the tests that `make test` leaves out, rare and long, and all random examples
	$(BIN)/pytest -n 2 -m 'nightly or hypothesis' --ignore tests/live --durations 10
	timeout -k 30 2700 $(BIN)/pytest -n 2 -m nightly $(LIVE) --durations 10

serve-demo: .venv/all tokenfleet-out/tiny-llama  ## two real vLLM workers on CPU behind http://127.0.0.1:8000/v1
	@echo "Starting two vLLM engines on CPU: one to two minutes until 'ready'."
	$(BIN)/tokenfleet serve --model tokenfleet-out/tiny-llama --workers 2

# It is for a host with GPUs and the packages of `tokenfleet[live-gpu]`: PYTHON=… names its Python.
gpu-day:  ## on a host with GPUs: measure what docs/limits-hardware.md lacks, one to two hours; MODEL=folder for a model's own
	@$(PYTHON) -m experiments.gpu.host_day $(if $(MODEL),--model $(MODEL))

wheel: .venv/wheel pack-kernels  ## dist/: a wheel with compiled kernels, for this Python and architecture
	$(BIN)/python -m hatchling build -t wheel

# The check installs the wheel in an empty environment and makes its first plan there.
release: wheel  ## dist/: wheel and sdist, checked in an empty environment, and the notes of the version
	$(BIN)/python -m hatchling build -t sdist
	sed -n '/^## /,/^## /p' CHANGELOG.md | sed '1b;/^## /d' > dist/NOTES.md
	$(BIN)/python benchmarks/first_plan.py --quick

tokenfleet-out/tiny-llama: .venv/all
	@echo "Making a tiny Llama with random weights in $@: about 20 seconds."
	$(BIN)/python examples/tiny_llama.py $@

pictures: .venv/all demo tokenfleet-out/tiny-llama  ## the pictures of the documentation, from real runs; needs Chromium
	$(BIN)/python examples/pictures/take.py
	$(BIN)/python examples/pictures/draw.py
	$(BIN)/python examples/pictures/terminal.py

docs: .venv/dev  ## build/site: the documentation as a site; a dead link ends it
	$(BIN)/python -m harness.site

reference: .venv/dev  ## the pages of docs/reference, from the code
	$(BIN)/python -m harness.reference

# The planner: no vLLM, no Ray, no GPU. The simulator compiles beside the rest of the installation; Python compiles
# the modules that are used.
.venv/base: pyproject.toml requirements/live-cpu.txt
	@echo "Setting up .venv with the planner's packages: half a minute or so the first time."
	test -d .venv || $(PYTHON) -m venv .venv
	$(PIP) --no-compile $(PINS) numba numpy scipy highspy pulp pyyaml
	$(BIN)/python deploy/compile_simulator.py > /dev/null 2>&1 & \
	  $(PIP) --no-compile $(PINS) --editable . && touch $@

# What builds wheels.
.venv/wheel: .venv/base
	$(PIP) 'hatchling>=1.26'
	touch $@

# Checks and the tests that need no engine.
.venv/dev: .venv/base requirements/dev.txt
	$(PIP) --no-compile $(PINS) --editable '.[dev]'
	touch $@

# The live plane on CPUs, and all tests. `--no-deps`: see requirements/live-cpu.txt. One process compiles the fifth of
# all modules that engines and gateways use; else each of those that start together would. PyPI has no CPU build of
# torch; an index of one's own may have it.
TORCH := $(shell grep '^torch==' requirements/live-cpu.txt)
.venv/all: .venv/dev
	$(PIP) --no-compile --no-deps $(TORCH) 2> /dev/null || \
	  $(PIP) --no-compile --no-deps --index-url https://download.pytorch.org/whl/cpu $(TORCH)
	$(PIP) --no-compile --no-deps -r requirements/live-cpu.txt -r requirements/dev.txt
	$(BIN)/python -c 'import dataplane.live.worker.actor, dataplane.live.gateway.server' > /dev/null
	touch $@

clean:  ## remove the environment, what was built, and what the demos wrote
	rm -rf .venv build dist tokenfleet-out
