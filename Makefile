# make train        install what is missing, then train the small model on synthetic data (ARGS="key=value ..." adds overrides)
# make test         install what is missing, then run the tests (ARGS="-k name ..." adds pytest options)
# make lint         ruff and the type checker
# make docs         build the documentation into docs/_site
# make cubins       compile the Hopper kernels whose sources have changed (kernels/hopper), without a GPU, in .venv-aot
# Everything is installed into .venv; a second call installs nothing. SET=cpu or SET=cuda overrides the choice of packages.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
# --no-compile: a run imports a small part of what is installed, and Python compiles that part itself.
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -qq
INSTALL := $(PIP) install --no-compile
ARGS ?=

SET ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
PINS := pyproject.toml $(wildcard requirements/*.txt)
STAMP := $(VENV)/.installed-$(SET)-$(shell cat $(PINS) | cksum | cut -d' ' -f1)

AOT := .venv-aot
AOT_TRITON := $(shell sed -n 's/^TRITON_VERSION = "\(.*\)"/triton==\1/p' kernels/hopper/build.py 2>/dev/null)

.PHONY: train test lint docs cubins data-movielens install rebuildable

train: install
	$(VENV)/bin/python train.py experiment=quickstart $(ARGS)

test: install data-movielens rebuildable
	$(VENV)/bin/python -m pytest -q -n 2 --dist loadfile --durations=15 $(ARGS)

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

docs: install
	$(VENV)/bin/python docs/build.py

install: $(STAMP)

data-movielens: $(STAMP)
	@$(VENV)/bin/python -c 'import importlib.metadata as m; m.version("recbole")' 2>/dev/null \
	  || $(INSTALL) --no-deps -r requirements/movielens.txt

cubins: $(AOT)/.installed
	$(AOT)/bin/python -m kernels.hopper.build $(ARGS)

# The tests compile some of the cubins again and skip that where this Triton cannot be had.
rebuildable: $(STAMP)
	@$(MAKE) --no-print-directory $(AOT)/.installed || echo "no $(AOT_TRITON) here: no cubin is compiled again"

$(AOT)/.installed: | $(STAMP)
	@echo "installing $(AOT_TRITON) into $(AOT)"
	@$(VENV)/bin/python -m venv $(AOT)
	@$(AOT)/bin/python -m pip --disable-pip-version-check -qq install --no-compile $(AOT_TRITON)
	@touch $@

# The +cpu build is several times smaller, but not every index has it; where it is missing, cpu.txt takes the plain one.
$(STAMP):
	@[ -x $(VENV)/bin/python ] || { python=$(or $(PYTHON),$$(bash requirements/find-python)); "$$python" -m venv $(VENV); }
	@echo "installing the $(SET) set into $(VENV)"
	@rm -f $(VENV)/.installed-*
ifeq ($(SET),cpu)
	@$(INSTALL) "$$(grep '^torch==' requirements/cpu.txt)+cpu" 2>/dev/null || true
endif
	@$(INSTALL) -r requirements/$(SET).txt
	@$(INSTALL) --no-deps -r requirements/torchrec.txt
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@
