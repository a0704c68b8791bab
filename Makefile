# Everything runs in .venv, which `make install` builds from pyproject.toml at the releases of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt

# Nothing below reaches for a model or a data set on a network.
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help install check format test test-slow test-gpu demo distill bench docs wheel clean distclean

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## Build .venv with everything that the other commands need

# torch goes first and alone: what follows then finds it in place, whichever build of it that is.
$(STAMP): pyproject.toml constraints.txt liger_losses/_version.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$$($(PYTHON) --version) found; the pinned environment needs Python 3.11 or later (make PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[dev]'
	@touch $@

check: $(STAMP) ## Lint, formatting, types, import arrows
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Apply ruff's fixes and formatting
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test: $(STAMP) ## Run the tests that need neither a GPU nor long
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu"

test-slow: $(STAMP) ## Run the slow tests
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow and not gpu"

test-gpu: $(STAMP) ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

demo: $(STAMP) ## Train with DPO on a tiny model, plain and fused (about two minutes)
	$(BIN)/python examples/dpo_trl.py

distill: $(STAMP) ## Distil a wider Llama into a narrower one, from its head and from its top k on disk (ten minutes)
	$(BIN)/python examples/distill.py
	$(BIN)/python examples/distill_topk.py

bench: $(STAMP) ## Run the benchmarks (needs a GPU)
	$(BIN)/python -m benchmarks

docs: $(STAMP) ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

wheel: $(STAMP) ## Build the wheel and the source archive into dist/
	$(BIN)/python -m build --no-isolation

clean: ## Remove build products and caches
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean ## Remove .venv too
	rm -rf $(VENV)
