# make demo      see the whole loop on a simulated GPU
# make test      run the tests
# make lint      ruff, mypy --strict, import-linter
# make shots     draw the screens as PNG into docs/images
# make bench     print the figures that the README and docs quote
#
# TORCH_INDEX=https://…/whl/cpu  takes torch from that index (PyTorch's own CPU builds are small; Linux's default one is not).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
DEMO_SCRIPT ?= samples/activations_too_big.py
DEMO_DEVICE ?= sim:a100-40g

.PHONY: demo test lint shots bench install install-dev clean

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints-dev.txt $(VENV)/.torch
	$(BIN)/python -m pip install --quiet --editable ".[dev]" --constraint constraints-dev.txt
	@touch $@ $(VENV)/.installed

demo: install
	$(BIN)/oomscope run --device $(DEMO_DEVICE) --yes $(DEMO_SCRIPT)

test: install-dev
	$(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

shots: install-dev
	$(BIN)/python tests/tools/shots.py docs/images

bench: install-dev
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
