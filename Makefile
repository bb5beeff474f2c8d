# make train | test | nightly | lint | docs | bench | clean: each makes the environment in .venv first where there is none.

PYTHON ?= python3
BIN := .venv/bin
# Twice quiet: errors only, without pip's warnings.
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test nightly lint docs bench clean

train: .venv/.installed
	@$(BIN)/python train.py --devices 2

# Two at a time: most of a test is the start of processes, which leaves a second core idle.
test: .venv/.installed-dev
	$(BIN)/python -m pytest -m "not nightly" --numprocesses 2 --dist worksteal
	cd doctor && ../$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist worksteal

nightly: .venv/.installed-dev
	$(BIN)/python -m pytest -m nightly --durations 20
	cd doctor && ../$(BIN)/python -m pytest -m slow --numprocesses 2 --dist worksteal

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy && cd doctor && ../$(BIN)/mypy
	$(BIN)/lint-imports && cd doctor && ../$(BIN)/lint-imports
	$(BIN)/codespell lit_mnist doctor benchmarks examples docs *.md

docs: .venv/.installed-dev
	@# Not --quiet: with it, mkdocs does not count warnings.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

bench: .venv/.installed
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build *.egg-info

.venv/.installed: pyproject.toml doctor/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@echo "installing the dependencies in .venv"
	@$(PYTHON) -m venv .venv
	@$(PIP) --editable . --editable doctor
	@touch $@

.venv/.installed-dev: .venv/.installed
	@$(PIP) --editable '.[dev,docs,engines]' --editable 'doctor[dev]'
	@touch $@
