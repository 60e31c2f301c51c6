# Set-up and the commands of this project, for a machine that has Python 3.11 or newer, git and make.
# `make help` lists them. Everything is installed into .venv, with uv if it is on the PATH.

VENV := .venv
VENV312 := .venv312
JAX312 := 0.11.2
VENV313 := .venv313
JAX313 := 0.12.0.1
MINUTES ?= 60
DEMO := gin_configs/examples/demo.gin
# A worker per core, at least two; the tests of a file stay together, as they share compiled
# functions, and tests/conftest.py orders the files. PARALLEL= runs one test after the other.
WORKERS = $(if $(filter 1 2,$(shell getconf _NPROCESSORS_ONLN)),2,auto)
PARALLEL ?= -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Seconds after which a test counts as hung; pytest.ini has fewer.
SLOW = -o faulthandler_timeout=1200

# tests/conftest.py sets the flags of quick compiles, unless there are some. For other processors:
# make test-optimized XLA_FLAGS=--xla_cpu_max_isa=AVX2
OPTIMIZED = XLA_FLAGS="--xla_force_host_platform_device_count=8 $(XLA_FLAGS)"

# python3, or the first of its newer siblings where python3 itself is too old (Ubuntu 22.04).
# The names are tried by running them: a pyenv shim is on the PATH whether or not it works.
USABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2])
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
  $$p -c '$(USABLE)' 2>/dev/null && echo $$p && break; done)
PYTHON312 ?= $(shell for p in python3.12 'env PYENV_VERSION=3.12.1 python3.12'; do \
  $$p -c '$(USABLE)' 2>/dev/null && echo $$p && break; done)
PYTHON313 ?= $(shell for p in python3.13 'env PYENV_VERSION=3.13.0 python3.13'; do \
  $$p -c '$(USABLE)' 2>/dev/null && echo $$p && break; done)

# uv does not read pip's settings. A folder of wheels beside the machine may have torch for the CPU
# alone; PyPI's brings gigabytes of CUDA with it. pip separates folders by spaces, uv by commas.
FIND_LINKS = $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
comma := ,
empty :=
space := $(empty) $(empty)
UV_LINKS = $(subst $(space),$(comma),$(strip $(FIND_LINKS)))

# $(call install,FOLDER,PYTHON,ITS USUAL NAME,ITS VARIABLE,FURTHER REQUIREMENTS): a virtual environment
# with this project in it.
define install
@test -n "$(strip $(2))" && $(2) -c '$(USABLE)' || { echo \
  "No usable Python for $(1): '$(or $(strip $(2)),$(3))' is" \
  "`$(or $(strip $(2)),$(3)) --version 2>&1 | head -n 1`; it takes Python 3.11 or newer." \
  "Name one: make $(4)=/path/to/python3.12"; exit 1; } >&2
@echo "Setting up $(1) with `$(2) --version` (once; some minutes the first time)"
@if command -v uv >/dev/null; then \
  links="$${UV_FIND_LINKS:-$(UV_LINKS)}"; test -z "$$links" || export UV_FIND_LINKS="$$links"; \
  uv venv --quiet --allow-existing --python "`$(2) -c 'import sys; print(sys.executable)'`" $(1) && \
  uv pip install --quiet --python $(1)/bin/python -e '.[dev]' $(5); \
else \
  { $(2) -m venv $(1) || { echo "On Debian and Ubuntu: apt install python3-venv, or get uv." >&2; \
    exit 1; }; } && \
  $(1)/bin/python -m pip install --quiet --disable-pip-version-check --use-pep517 -e '.[dev]' $(5); \
fi
@touch $@
endef

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo "  PYTHON=python3.12 picks the Python of .venv; ARGS='-k mesh' is handed to pytest."

setup: $(VENV)/.installed ## create .venv and install everything; a second call does nothing

lint: $(VENV)/.installed ## check the style, as CI does (ruff.toml)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.installed ## apply the style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

demo: $(VENV)/.installed ## train a small model on Python's own source text, about three minutes
	$(VENV)/bin/python -m t5x_gpu.train --gin_file=$(DEMO)

test-quick: $(VENV)/.installed ## run the tests that take two minutes: no process, no TensorFlow
	$(VENV)/bin/python -m pytest --quick $(PARALLEL) $(ARGS)

test: $(VENV)/.installed ## run the tests, without the slow ones: a quarter of an hour on two cores
	$(VENV)/bin/python -m pytest -m 'not slow' $(PARALLEL) $(ARGS)

# Without the cases that `make test-versions` runs on each Python, also on this one.
test-all: $(VENV)/.installed ## run all tests, slow ones included: two hours on two cores
	$(VENV)/bin/python -m pytest -m 'not (slow and versions)' $(SLOW) $(PARALLEL) $(ARGS)

test-optimized: $(VENV)/.installed ## the same, compiled as users compile: two and a half hours
	$(OPTIMIZED) $(VENV)/bin/python -m pytest $(SLOW) $(PARALLEL) $(ARGS)

test-py312: $(VENV312)/.installed ## run all tests on Python 3.12 with a newer jax
	$(VENV312)/bin/python -m pytest $(SLOW) $(PARALLEL) $(ARGS)

test-py313: $(VENV313)/.installed ## run all tests on Python 3.13 with the newest jax
	$(VENV313)/bin/python -m pytest $(SLOW) $(PARALLEL) $(ARGS)

# T5's package pins nightly builds of SeqIO and TFDS: it goes beside the virtual environment, with
# what its tasks and metrics import and without what it asks for.
T5 := build/t5
T5_PACKAGES := t5==0.9.4 babel nltk rouge-score sacrebleu scikit-learn pandas joblib threadpoolctl \
  narwhals portalocker colorama tabulate lxml regex six click tqdm python-dateutil

$(T5): $(VENV)/.installed
	@if command -v uv >/dev/null; then \
	  uv pip install --quiet --no-deps --python $(VENV)/bin/python --target $(T5) $(T5_PACKAGES); \
	else $(VENV)/bin/python -m pip install --quiet --no-deps --target $(T5) $(T5_PACKAGES); fi
	@touch $@

test-t5: $(T5) ## train on the tasks of T5's own package, which it installs into build/t5
	PYTHONPATH=$(T5) $(VENV)/bin/python -m pytest tests/test_train_tfds.py $(ARGS)

# The clients of W&B and MLflow, and MLflow's server, beside the virtual environment, in its versions.
# pyarrow is the exception: MLflow wants an older one, and pip prints a conflict that does no harm.
LOGGERS := build/loggers

$(LOGGERS): $(VENV)/.installed
	@set -e; rm -rf $(LOGGERS); mkdir -p build; if command -v uv >/dev/null; then \
	  pip="uv pip" python="--python $(VENV)/bin/python"; \
	else pip="$(VENV)/bin/python -m pip" python=; fi; \
	$$pip freeze --quiet --exclude-editable $$python | grep -v ^pyarrow > build/installed.txt; \
	$$pip install --quiet $$python --target $(LOGGERS) -c build/installed.txt \
	  'wandb>=0.31,<0.32' 'mlflow>=3.17,<4'
	@touch $@

test-loggers: $(LOGGERS) ## log to real clients of W&B and MLflow, which it installs into build/loggers
	PYTHONPATH=$(abspath $(LOGGERS)) $(VENV)/bin/python -m pytest tests/metrics/test_loggers.py $(ARGS)

# lm-evaluation-harness with what it imports, beside the virtual environment, in its versions.
HARNESS := build/harness

$(HARNESS): $(VENV)/.installed
	@set -e; rm -rf $(HARNESS); mkdir -p build; if command -v uv >/dev/null; then \
	  pip="uv pip" python="--python $(VENV)/bin/python"; \
	else pip="$(VENV)/bin/python -m pip" python=; fi; \
	$$pip freeze --quiet --exclude-editable $$python > build/installed.txt; \
	$$pip install --quiet $$python --target $(HARNESS) -c build/installed.txt 'lm_eval>=0.4.13,<0.5'
	@touch $@

test-harness: $(HARNESS) ## measure a model with lm-evaluation-harness, which it installs into build/harness
	PYTHONPATH=$(abspath $(HARNESS)) $(VENV)/bin/python -m pytest tests/evaluation/test_harness.py $(ARGS)

# The compiler for GPUs, beside a virtual environment: two wheels of the same version as its jaxlib,
# without NVIDIA's libraries.
AOT := build/aot
AOT313 := build/aot313

# $(call install_compiler,VIRTUAL ENVIRONMENT)
define install_compiler
@set -e; jaxlib=`$(1)/bin/python -c 'import jaxlib; print(jaxlib.__version__)'`; \
wheels="jax-cuda13-plugin==$$jaxlib jax-cuda13-pjrt==$$jaxlib"; rm -rf $@; \
if command -v uv >/dev/null; then \
  uv pip install --quiet --no-deps --python $(1)/bin/python --target $@ $$wheels; \
else $(1)/bin/python -m pip install --quiet --no-deps --target $@ $$wheels; fi
@touch $@
endef

$(AOT): $(VENV)/.installed
	$(call install_compiler,$(VENV))

$(AOT313): $(VENV313)/.installed
	$(call install_compiler,$(VENV313))

# Without the compiler these tests fail; elsewhere they are skipped then.
COMPILED = $(OPTIMIZED) T5X_GPU_TEST_AOT=1

test-aot: $(AOT) ## compile training steps for absent GPUs; compare with recorded figures
	$(COMPILED) PYTHONPATH=$(AOT) $(VENV)/bin/python -m pytest tests/aot \
	  tests/test_benchmarks.py -m 'aot and not all_searches' \
	  $(SLOW) -n $(WORKERS) --dist worksteal $(ARGS)

# What differs between versions of jax and Tokamax: kernels for GPUs, lowered, the numbers of the
# regions that they run in, and what the newest XLA makes of a few steps.
test-versions: $(VENV)/.installed $(VENV312)/.installed $(AOT313) ## lower the steps of all models for GPUs, on each Python; compile some on the newest jax
	@$(VENV)/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo \
	  "$(VENV) has `$(VENV)/bin/python --version`, and the oldest jax needs Python 3.11:" \
	  "make test-versions VENV=.venv311 PYTHON=/path/to/python3.11"; exit 1; } >&2
	set -e; for venv in $(VENV) $(VENV312) $(VENV313); do \
	  $$venv/bin/python -c "import sys; from importlib.metadata import version as v; print( \
	    'Python', sys.version.split()[0], 'jax', v('jax'), 'tokamax', v('tokamax'))"; \
	  $$venv/bin/python -m pytest tests/test_lowering.py tests/test_bench_gpu.py \
	    tests/parity/test_layouts.py -m versions \
	    $(SLOW) -n $(WORKERS) --dist worksteal $(ARGS); done
	$(COMPILED) PYTHONPATH=$(AOT313) $(VENV313)/bin/python -m pytest \
	  tests/aot/test_compiled_steps.py $(SLOW) -n $(WORKERS) --dist worksteal $(ARGS)

test-searches: $(AOT) ## check plan --search from 134M to 70B on 8, 64 and 192 GPUs: an hour
	$(COMPILED) PYTHONPATH=$(AOT) $(VENV)/bin/python -m pytest tests/aot/test_search.py \
	  -m all_searches -s $(SLOW) $(ARGS)

docs: $(VENV)/.installed ## build the documentation site into build/site
	$(VENV)/bin/python scripts/docs_site.py

soak: $(VENV)/.installed ## kill, damage and resume runs for MINUTES=60, to find work that is lost
	$(VENV)/bin/python -m tests.soak --minutes=$(MINUTES) $(ARGS)

clean: ## remove the virtual environments and what builds and tests left; runs/ stays
	rm -rf $(VENV) $(VENV312) $(VENV313) build dist *.egg-info .pytest_cache .hypothesis
	find t5x_gpu tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so that an interrupted set-up is taken up again.
$(VENV)/.installed: setup.py
	$(call install,$(VENV),$(PYTHON),python3,PYTHON)

$(VENV312)/.installed: setup.py
	$(call install,$(VENV312),$(PYTHON312),python3.12,PYTHON312,jax==$(JAX312))

$(VENV313)/.installed: setup.py
	$(call install,$(VENV313),$(PYTHON313),python3.13,PYTHON313,jax==$(JAX313))

.DEFAULT_GOAL := help
.PHONY: help setup lint format demo test-quick test test-all test-optimized test-py312 test-py313 test-t5 test-loggers test-harness test-aot test-versions test-searches docs soak clean
