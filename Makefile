# Two commands are enough: `make demo` and `make test`. Everything else is for people who work on
# pycomm. VENV, PYTHON and TORCH may be set: make demo TORCH=torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
export PYTHON VENV TORCH
BIN := $(abspath $(VENV))/bin

STAGES := core-tests python-tests train-tests host-tests rdma-tests soak simulate sanitize fuzz cuda aarch64 install-check large-messages
.PHONY: help lab demo test-rdma rdma-shell test test-all prove lint format install clean $(STAGES)

help: ## This list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

install: ## A virtual environment with torch, and pycomm built into it.
	@bash .ci/setup.sh install

demo: install ## Train a small GPT on real text over pycomm; curve in demo/curve.png.
	@$(BIN)/pycomm demo --out demo $(ARGS)

test: ## The tests: about 15 minutes, no root, no VM.
	@bash .ci/setup.sh test
	@bash .ci/stages.sh core-tests python-tests host-tests train-tests

test-all: ## The tests, 10,000 simulations, sanitizers, fuzzers, CUDA and aarch64 builds, the probes.
	@bash .ci/setup.sh test-all
	@bash .ci/stages.sh core-tests python-tests host-tests train-tests simulate sanitize fuzz cuda aarch64 \
	  install-check large-messages prove rdma-tests

prove: ## Five claims of the transport contract, one line each.
	@bash .ci/setup.sh test-all
	@bash .ci/stages.sh prove prove-verbs

test-rdma: ## RDMA on the kernel's driver, in a virtual machine that it boots; about 3 minutes.
	@bash .ci/setup.sh test
	@bash .ci/stages.sh rdma-tests

rdma-shell: ## A shell in that machine: rxe0 to rxe3 on two links.
	@python3 tests/softroce/vm.py shell --links 2

lab: install ## Two hosts with 40 ms and 1 % loss between them; needs root. pycomm lab down ends it.
	@$(BIN)/pycomm lab up --rtt 40 --loss 1 --wan-rate 1000 $(ARGS)

$(STAGES):
	@bash .ci/stages.sh $@

lint: ## clang-format, ruff, mypy and the rules of tests/tidy.
	@$(BIN)/python -m pytest -q tests/tidy

format: ## Rewrite the sources in the project's format.
	@git ls-files '*.cc' '*.h' '*.cu' '*.inc' | xargs $(BIN)/clang-format -i
	@$(BIN)/ruff check --fix -q . && $(BIN)/ruff format -q .

clean: ## Remove what was built.
	@rm -rf build demo $(VENV)
