# `make demo` and `make test` are all that a newcomer needs; each makes the environment that it runs in.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

.PHONY: demo test lint docs results bench clean

demo: $(VENV)/.demo-installed
	$(BIN)/flexrank run examples/minilm.yaml

test: $(VENV)/.dev-installed
	$(BIN)/python -m pytest

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site of documentation, into site/.
docs: $(VENV)/.docs-installed
	$(BIN)/mkdocs build

# The quick forms of the paper's studies, on the models and data that FLEXRANK_ASSETS names; docs/results.md from their JSON.
results: $(VENV)/.dev-installed
	$(BIN)/python -m research --all --page

# What each stage costs, and what the sizes are worth; docs/performance.md from the JSON.
bench: $(VENV)/.dev-installed
	$(BIN)/python -m research --benches --page

clean:
	rm -rf $(VENV) runs site

$(VENV)/.torch-installed:
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch into $(VENV)"
	$(PIP) torch==2.13.0
	@touch $@

# torch is in the environment by now, so that no range of another package brings a different build of it.
$(VENV)/.demo-installed: $(VENV)/.torch-installed constraints.txt pyproject.toml
	@echo "installing flexrank and what the demo needs"
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.torch-installed constraints.txt pyproject.toml
	@echo "installing flexrank and what the tests need"
	$(PIP) -e '.[dev]'
	@touch $(VENV)/.demo-installed $@

$(VENV)/.docs-installed: $(VENV)/.torch-installed constraints.txt pyproject.toml
	@echo "installing flexrank and what its documentation needs"
	$(PIP) -e '.[docs,report]'
	@touch $@
