# `make train` and `make test` are all a newcomer needs: both create .venv first if it is missing.
PYTHON ?= python3
BIN = .venv/bin
# processes: most of each test runs on one core
AT_ONCE = -n 2 --dist worksteal
# units, and each seam once
FIRST = (unit or seam) and not matrix
# which part of the tests to run: `make test-all SHARD=2/4` runs the second quarter
SHARD ?= 1/1
# seconds: whole commands of README take longer than any test of `make test` may
LONGER = -o faulthandler_timeout=1200 --shard=$(SHARD)
NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lowmem needs Python 3.11 or newer, and $(PYTHON) is %d.%d: try make PYTHON=python3.12" % sys.version_info[:2])'

.PHONY: train test test-all test-rest test-docs test-kernels test-oldest test-newest test-gpu lint format

train: .venv/installed
	$(BIN)/python train.py

test: .venv/installed
	$(BIN)/python -m pytest -m "$(FIRST)" $(AT_ONCE)

test-all: .venv/installed
	$(BIN)/python -m pytest $(LONGER) $(AT_ONCE)

# what `make test` leaves out
test-rest: .venv/installed
	$(BIN)/python -m pytest -m "not ($(FIRST))" $(LONGER) $(AT_ONCE)

# pages and their commands, packaging, and the tools of tests and benchmarks
test-docs: .venv/installed
	$(BIN)/python -m pytest -m docs $(LONGER) $(AT_ONCE)

test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest -m "$(FIRST)" -W default $(AT_ONCE)

test-newest: .venv-newest/installed
	.venv-newest/bin/python -m pytest -m "$(FIRST)" -W default $(AT_ONCE)

# tests of numbers, with the kernels of other processors: a table at the end; `SHARD=2/9` runs the second of nine
test-kernels: .venv/installed
	$(BIN)/python tests/support/other_kernels.py --shard=$(SHARD) $(AT_ONCE)

# what CUDA does otherwise; everything is skipped where there is none. CROWD_THE_CARD=1 also fills the card, which may hang
test-gpu: .venv/installed
	$(BIN)/python -m pytest -m gpu

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/support/prose.py src/lowmem benchmarks tests
	$(BIN)/python tests/support/prose.py --texts src/lowmem conf docs README.md
	$(BIN)/python tests/support/house.py src/lowmem conf
	$(BIN)/python tests/support/repeated.py --most 6 src/lowmem benchmarks

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: requirements.txt pyproject.toml
	$(NEW_ENOUGH)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements.txt -e .
	touch $@

# the lowest versions that pyproject.toml admits
.venv-oldest/installed: tests/support/oldest.py pyproject.toml
	$(NEW_ENOUGH)
	$(PYTHON) -m venv .venv-oldest
	$(PYTHON) tests/support/oldest.py > .venv-oldest/requirements.txt
	.venv-oldest/bin/python -m pip install --quiet -r .venv-oldest/requirements.txt -e .
	touch $@

# the newest releases that pyproject.toml admits
.venv-newest/installed: pyproject.toml
	$(NEW_ENOUGH)
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet -e '.[dev,benchmarks]'
	touch $@
