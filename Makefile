# Two commands, each from a fresh clone with Python 3.11 or newer and nothing else:
#   make notebooks   executes every notebook into build/notebooks/
#   make test        runs the tests, then compares every notebook with its stored outputs
# Both set up .venv first. `make help` lists the rest.

# Workers of the tests and of the notebook comparison.
JOBS ?= 2

VENV := .venv
PY := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)/python
EXTRAS := notebooks,test

# The stamp's name holds what was installed: pyproject.toml, constraints.txt, the version that is read from cce/__init__.py,
# the place (an editable install points to it) and PYTHON. So any change installs again, and a mere touch or checkout does not.
VERSION_LINE := $(shell grep '^__version__' cce/__init__.py 2>/dev/null)
KEY := $(shell { cat pyproject.toml constraints.txt; echo '$(CURDIR) $(PYTHON) $(VERSION_LINE)'; } | cksum | cut -d' ' -f1)
STAMP := $(VENV)/installed-$(KEY)

# Every Python here is .venv's. IPYTHONDIR: kernels get neither the reader's start-up files nor a shared history database.
export IPYTHONDIR := $(CURDIR)/build/ipython
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help setup notebooks notebooks-update test test-python test-notebooks test-slow lab lint figures clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "make %-17s %s\n", $$1, $$2}'
	@echo "PYTHON=python3.12 chooses the Python of .venv, JOBS=$(JOBS) the number of test workers."

setup: $(STAMP) ## create .venv and install the pinned packages; every target below does this first

# Versions are compared so that PYTHON=… makes a new .venv where it must, and an existing one is kept otherwise:
# torch with CUDA is gigabytes.
$(STAMP):
	@find_python() { \
	  for p in $(if $(PYTHON),'$(PYTHON)',python3.13 python3.12 python3.11 python3 python); do \
	    if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo "$$p"; return; fi; \
	  done; }; \
	version() { "$$1" -c 'import sys; print(sys.version)' 2>/dev/null || echo none; }; \
	rm -f $(VENV)/installed-*; \
	have=$$(version $(PY)); \
	if [ "$$have" = none ] || { [ -n '$(PYTHON)' ] && [ "$$have" != "$$(version '$(PYTHON)')" ]; }; then \
	  python=$$(find_python); \
	  if [ -z "$$python" ]; then \
	    echo "Python 3.11 or newer is needed, and $(if $(PYTHON),PYTHON=$(PYTHON) is not one,none was found on PATH). Found: $$(python3 --version 2>&1 || true)" >&2; \
	    echo "Install one (python.org, your package manager, conda), or name it: make setup PYTHON=/path/to/python3.12" >&2; \
	    exit 1; \
	  fi; \
	  echo "Setting up $(VENV) with $$python ($$("$$python" -c 'import platform; print(platform.python_version())'))"; \
	  "$$python" -m venv --clear $(VENV) || { \
	    echo "$$python cannot create a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	fi
	$(PY) -m pip install --disable-pip-version-check --upgrade -c constraints.txt pip
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

notebooks: $(STAMP) ## execute every notebook into build/notebooks/ (ipynb and HTML); uses a GPU where there is one
	@$(PY) tools/run_notebooks.py

notebooks-update: $(STAMP) ## execute every notebook at CPU size and rewrite its stored outputs in place
	@$(PY) tools/run_notebooks.py --update

test: $(STAMP) ## run the tests, then compare every notebook with its stored outputs
	@status=0; \
	$(MAKE) --no-print-directory test-python || status=1; \
	$(MAKE) --no-print-directory test-notebooks || { status=1; \
	  echo "If a notebook's new output is right, store it with: make notebooks-update" >&2; }; \
	exit $$status

# One thread a worker: the workers fill the cores already.
test-python: $(STAMP) ## the first half of `make test`
	OMP_NUM_THREADS=1 $(PY) -m pytest tests -n $(JOBS)

# Stored outputs are of CPU size, so the GPU is hidden. loadscope keeps a notebook's cells in one worker and in order.
# --list leaves out, by name, the notebooks that this platform cannot run.
test-notebooks: $(STAMP) ## the second half of `make test`
	@list=$$($(PY) tools/run_notebooks.py --list) || exit 1; \
	if [ -z "$$list" ]; then echo "no notebooks to compare yet"; exit 0; fi; \
	set -x; \
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(PY) -m pytest --nbval --nbval-current-env --nbval-cell-timeout 300 \
	  -n $(JOBS) --dist loadscope $$list

test-slow: $(STAMP) ## the long tests alone
	$(PY) -m pytest tests -m slow -v

lab: $(STAMP) ## open JupyterLab on the notebooks
	$(PY) -m jupyterlab --LabApp.default_url=/lab/tree/notebooks

lint: $(STAMP) ## ruff: rules and format, nothing is rewritten
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

figures: $(STAMP) ## redraw figures/ from figures/data/ and from the notebooks (minutes)
	$(PY) -m cce.bench.figures
	$(PY) tools/export_figures.py

clean: ## remove what was built, and the caches; .venv stays (rm -r .venv)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find cce tests tools notebooks \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune -exec rm -rf {} +
