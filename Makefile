# Two commands a fresh machine needs: `make demo` and `make test`. Both create .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ON = .venv-$(TORCH)
BUILD := .venv-build
EMPTY := .venv-empty

.PHONY: demo dist docs test test-all test-gpu test-on lint check clean

demo: $(VENV)/.installed
	$(BIN)/guardbit demo

# The site, in site/; a warning is an error. The variable keeps an advertisement out.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean
	@echo "The site: site/index.html. It opens from the disk, search included."

test: lint
	$(BIN)/pytest -n 2 --dist worksteal -rs --durations=20

# Tests marked `slow` as well: all committed runs of the study, compiled models beside each of the
# user's modes, and kernels compiled ahead of time.
test-all: lint
	$(BIN)/pytest -n 2 --dist worksteal -rs -m "not gpu"

# The tests marked `gpu`, with the PyTorch of $(PYTHON): a process needs up to 12 GB of the first card.
test-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu -p no:benchmark -rs -n $$($(PYTHON) -c \
		"import torch; print(max(1, torch.cuda.mem_get_info(0)[0] // (12 << 30)))") tests

# The suite on another release of PyTorch, `make test-on TORCH=2.15.0`, in an environment of its own. All else
# is as pinned, but for what PyTorch itself pins; Triton 3.6, of PyTorch 2.11, does not know NumPy 2.4.
test-on:
	test -x $(ON)/bin/python || $(PYTHON) -m venv $(ON)
	sed -E '/^(torch|triton|setuptools|sympy|networkx)==/d$(if $(filter 2.11.%,$(TORCH)),; s/^(numpy==).*/\12.3.5/)' \
		constraints.txt > $(ON)/constraints.txt
	$(ON)/bin/pip install --quiet --disable-pip-version-check "torch==$(TORCH)"
	$(ON)/bin/pip install --quiet --disable-pip-version-check \
		--constraint $(ON)/constraints.txt --editable ".[dev]"
	$(ON)/bin/pytest -n 2 --dist worksteal -rs

# What a release publishes, in dist/: checked, and the wheel tried where nothing else is installed.
dist: export PYTHONPATH :=
dist:
	rm -rf dist $(EMPTY)
	test -x $(BUILD)/bin/python || $(PYTHON) -m venv $(BUILD)
	$(BUILD)/bin/pip install --quiet --disable-pip-version-check "build>=1.2" "twine>=6.1"
	$(BUILD)/bin/python -m build
	$(BUILD)/bin/twine check --strict dist/*
	$(PYTHON) -m venv $(EMPTY)
	$(EMPTY)/bin/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(EMPTY)/bin/pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt dist/*.whl pytest
	cd $(EMPTY) && bin/guardbit --version && bin/guardbit demo --recorded
	cd $(EMPTY) && bin/python -m pytest -c /dev/null --noconftest -p no:cacheprovider -q -rs \
		../tests/test_lean_import.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-cache

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "First .venv gets PyTorch and all else that is pinned: minutes, by your network. This happens once."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .venv-2.* $(BUILD) $(EMPTY) dist runs site
