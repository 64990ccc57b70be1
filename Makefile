# Two commands set everything up: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3.11
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
PINS := -c requirements/live-cpu.txt -c requirements/dev.txt
.PHONY: help demo test check unit live serve-demo pictures clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

demo: .venv/base  ## set up, plan a fleet for the sample trace, write the report
	$(BIN)/tokenfleet plan --trace examples/sample_trace.csv --model llama-3.1-70b \
	  --gpu a100 --gpu h100 --gpu h200 --slo ttft=1.6s,tpot=75ms --output-dir tokenfleet-out/demo

test: check unit live  ## set up everything, run all checks and tests

check: .venv/all  ## ruff, mypy, import-linter, the size of modules and functions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python benchmarks/structure.py

unit: .venv/all  ## tests that start no engine; the kernels are compiled once, before the tests share them
	$(BIN)/tokenfleet simulate --trace examples/sample_trace.csv --model llama-3.1-8b --gpu h100 --tp 1 \
	  --workers 2 --slo ttft=1s,tpot=50ms --window 0s..10s > /dev/null
	$(BIN)/pytest -n 2 --ignore tests/live

live: .venv/all  ## tests on real vLLM engines, Ray and servers; vLLM's GPU-side choices, without a GPU
	$(BIN)/pytest -n 2 tests/rehearsal
	timeout -k 30 2700 $(BIN)/pytest -n 2 --dist loadfile tests/live --durations 10

serve-demo: .venv/all tokenfleet-out/tiny-llama  ## two real vLLM workers on CPU behind http://127.0.0.1:8000/v1
	@echo "Starting two vLLM engines on CPU: one to two minutes until 'ready'."
	$(BIN)/tokenfleet serve --model tokenfleet-out/tiny-llama --workers 2

tokenfleet-out/tiny-llama: .venv/all
	@echo "Making a tiny Llama with random weights in $@: about 20 seconds."
	$(BIN)/python examples/tiny_llama.py $@

pictures: .venv/all demo tokenfleet-out/tiny-llama  ## the pictures of the documentation, from real runs; needs Chromium
	$(BIN)/python examples/pictures/take.py
	$(BIN)/python examples/pictures/draw.py

# The planner: no vLLM, no Ray, no GPU.
.venv/base: pyproject.toml requirements/live-cpu.txt
	@echo "Setting up .venv with the planner's packages: about a minute the first time."
	test -d .venv || $(PYTHON) -m venv .venv
	$(PIP) $(PINS) --editable .
	touch $@

# The live plane on CPUs, checks and tests. `--no-deps`: see requirements/live-cpu.txt.
.venv/all: .venv/base requirements/dev.txt
	@echo "Adding vLLM, Ray and the tools of the tests to .venv: some minutes the first time."
	$(PIP) --no-deps -r requirements/live-cpu.txt -r requirements/dev.txt
	touch $@

clean:  ## remove the environment and what the demos wrote
	rm -rf .venv tokenfleet-out
