# Each target does all the set-up it needs. People start with `make run`; CI runs .ci/run, which is `make check`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup run test lint check chaos bench clean

ARGS ?=

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "perdure needs Python 3.11 or newer, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt setuptools torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[s3,deepspeed,dev]'
	touch $@

run: setup
	$(BIN)/perdure run examples/gpt/run.toml

test: setup
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

chaos: setup
	$(BIN)/pytest -m chaos -p no:cacheprovider -s

bench: .venv/.bench
	$(BIN)/python -m benchmarks $(ARGS)

.venv/.bench: .venv/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
