# make train | make test | make quick | make soak | make lint | make docs | make pictures | make gallery | make browser | make bench | make doctor-corpus: each makes the environment in .venv first where there is none.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Twice quiet: errors only, without pip's warnings.
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt

# Two devices where there are two GPUs or none, else the one GPU.
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
DEVICES := $(if $(filter 1,$(GPUS)),1,2)

.PHONY: train test quick soak lint docs pictures gallery browser bench doctor-corpus clean

train: $(VENV)/.installed
	@echo "$(GPUS) GPUs found: training on $(DEVICES) device(s)"
	@$(BIN)/python train.py --devices $(DEVICES)

# Two at a time: most of a test is one process's start, which leaves a second core idle.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist worksteal

# What concerns the changed files, in about a minute.
quick: $(VENV)/.installed-dev
	$(BIN)/python tests/quick.py

# The measurements of the fault suite go into docs/reliability.md. The mutations show that the tests can fail.
soak: $(VENV)/.installed-dev
	mkdir -p build && rm -f build/fault-metrics.jsonl
	FAULT_METRICS=$(CURDIR)/build/fault-metrics.jsonl $(BIN)/python -m pytest -m slow
	FAULT_METRICS=$(CURDIR)/build/fault-metrics.jsonl $(BIN)/python -m pytest -m "not slow" tests/faults
	$(BIN)/python tests/faults/table.py build/fault-metrics.jsonl
	$(BIN)/python tests/mutations/mutate.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell lit_mnist ddp_doctor benchmarks examples docs *.md

docs: $(VENV)/.installed-dev
	@# Not --quiet: with it, mkdocs does not count warnings.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

# Draws the pictures of the pages from the data beside their scripts.
pictures: $(VENV)/.installed
	@for script in $$(ls docs/pictures/*.py | grep -v /svg.py); do $(BIN)/python $$script || exit 1; done

# Makes the gallery from real runs.
gallery: $(VENV)/.installed-dev
	$(BIN)/python docs/gallery/gallery.py

# Opens every page in light and dark at 390 and 1,400 pixels, and leaves images of them.
browser: $(VENV)/.installed-dev
	@command -v chromedriver > /dev/null || { echo "This takes Chromium and its driver: apt-get install chromium chromium-driver" >&2; exit 2; }
	LIT_MNIST_TEST_SCREENSHOTS=$(CURDIR)/build/browser $(BIN)/python -m pytest tests/browser
	@echo "build/browser"

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

# Examines public programs; CORPUS holds words of corpus.py, such as --checkouts DIR.
doctor-corpus: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --requirement tests/ddp_doctor/corpus/requirements.txt
	$(BIN)/python tests/ddp_doctor/corpus/corpus.py $(CORPUS)

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@echo "installing the dependencies in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(PIP) --editable '.[dev,docs,engines,export]'
	@touch $@
