# make demo, make test: everything from an empty machine to the result. What is set up leaves a stamp in .venv,
# so that a second call is quick: changed C++ runs ninja alone, changed pyproject or constraints runs pip.
#
#   PYTHON  interpreter that .venv is made from (3.10 or newer)
#   TORCH   version of torch in .venv
#   ARCHS   CMake CUDA architectures to build kernels for, when there is an nvcc
#   ARGS    passed on to pytest or the demo:  make test ARGS="-k mfu -x",  make demo ARGS="--json out.json"
#   OUT     where gpu-check writes;  WHEELS  a folder of wheels it may install from (it never downloads)
#   PHASES  what gpu-check does, where that is not everything:  make gpu-check PHASES="build optimize_gpu"
PYTHON ?= python3
TORCH ?= 2.14.1
TORCHES ?= 2.11.0 2.13.0 2.14.1
ARCHS ?= 90-real
ARGS ?=
OUT ?= build/gpu-check

VENV := .venv
BUILD := build/venv
# --no-compile: torch's 10,000 modules are compiled when imported, a minute that most runs never need
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
CONFIGURE := -C cmake.define.FLATOUT_CUDA_ARCHS='$(ARCHS)' -C cmake.define.FLATOUT_WERROR=ON
print_site := import sysconfig; print(sysconfig.get_path("platlib"))
print_flatout := import torch, flatout; print("torch", torch.__version__, "flatout", flatout.__file__); \
  assert "site-packages" in flatout.__file__
TOOLS := cmake ninja scikit-build-core pybind11
JOBS := $(shell nproc 2>/dev/null || echo 2)
# One process more than cores, because some tests wait for processes of their own: 9:18 instead of 10:23 minutes on two
# cores. A file's tests share its fixtures, so they stay in one process.
PARALLEL := -n $(shell expr $(JOBS) + 1) --dist loadfile

# Folders are listed too: their time changes when a file comes or goes.
native := $(shell find csrc cmake -not -name '.*' 2>/dev/null) CMakeLists.txt
python := $(shell find src -not -name '.*' -not -path '*__pycache__*' 2>/dev/null)
headers := $(filter %.h %.cuh,$(native))
formatted := $(filter %.h %.cuh %.cpp %.cu,$(native)) $(shell find tests/emulated_cuda -name '*.h' -o -name '*.cpp' -o -name '*.cu')
tidied := $(patsubst %,build/tidy/%.ok,$(filter %.cpp,$(native)))

.PHONY: demo test test-scripts test-emulated lint format test-torches gpu-check clean FORCE
.DELETE_ON_ERROR:

demo: $(VENV)/.native
	$(VENV)/bin/python -m flatout demo $(ARGS)

test: $(VENV)/.native $(VENV)/.dev
	$(VENV)/bin/python -m pytest $(PARALLEL) --ignore=tests/foreign_scripts $(ARGS)

# Whole training scripts of 19 kinds, each by python and twice by flatout run. A script is a process of its own.
test-scripts: $(VENV)/.native $(VENV)/.dev
	$(VENV)/bin/python -m pytest -n $(JOBS) tests/foreign_scripts $(ARGS)

# The kernels without a GPU: compiled by g++, compared with the optimizers' definitions, also under AddressSanitizer.
EMULATED := build/emulated
EMULATED_KERNELS := $(EMULATED)/tests/emulated_cuda/emulated_kernels
.PHONY: configure-emulated build-emulated test-kernels test-emulated-all
configure-emulated: $(VENV)/.flatout
	$(VENV)/bin/cmake -S . -B $(EMULATED) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(VENV)/bin/python -DFLATOUT_CUDA=EMULATED -DFLATOUT_WERROR=ON

test-kernels: configure-emulated
	$(VENV)/bin/cmake --build $(EMULATED) --target emulated_kernels emulated_kernels_asan
	$(EMULATED_KERNELS)
	$(EMULATED_KERNELS)_asan --small

# tests/gpu and tests/emulated_cuda on emulated devices, with torch's kernels replaced by the CPU's.
#   make test-emulated ARGS="--seeds 1 2 3 --orders lazy"
#   make test-emulated ARGS=mutants      bugs planted one at a time: each must be found
build-emulated: configure-emulated $(VENV)/.native $(VENV)/.dev
	$(VENV)/bin/cmake --build $(EMULATED)

test-emulated: build-emulated
ifeq ($(ARGS),mutants)
	$(VENV)/bin/python -m tests.emulated_cuda.mutants --build build/mutants
else
	$(VENV)/bin/python -m tests.emulated_cuda.run --build $(EMULATED) $(ARGS)
endif

# Everything on emulated devices: all cases and orders, slow tests, sanitizers, mutants.
#   make test-emulated-all SEED=2
SEED ?= 1
test-emulated-all: build-emulated
	$(VENV)/bin/cmake --build $(EMULATED) --target emulated_kernels emulated_kernels_asan emulated_kernels_tsan
	EMULATED_CUDA_SEED=$(SEED) $(EMULATED_KERNELS)
	EMULATED_CUDA_SEED=$(SEED) $(EMULATED_KERNELS)_asan
	EMULATED_CUDA_SEED=$(SEED) $(EMULATED_KERNELS)_tsan --small
	$(VENV)/bin/python -m tests.emulated_cuda.run --build $(EMULATED) --seeds $(SEED) --orders random lazy eager --all
	$(VENV)/bin/python -m tests.emulated_cuda.mutants --build build/mutants

# ---- the environment ---------------------------------------------------------------------------------------

$(VENV)/.settings: FORCE
	@mkdir -p $(VENV)
	@echo '$(PYTHON) $(TORCH) $(ARCHS)' | cmp -s - $@ || echo '$(PYTHON) $(TORCH) $(ARCHS)' >$@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version; \
	  sys.exit(sys.version_info < (3, 10) and "flatout needs Python >= 3.10, PYTHON is " + v)'
	$(PYTHON) -m venv $(VENV)

# constraints.txt with the wanted torch in it
$(VENV)/constraints.txt: constraints.txt $(VENV)/.settings
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt >$@

$(VENV)/.torch: $(VENV)/constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python $(PIP) -c $(VENV)/constraints.txt --upgrade pip
	$(VENV)/bin/python $(PIP) -c $(VENV)/constraints.txt torch $(TOOLS)
	@touch $@

# An editable install knows the modules that were there when it was made.
$(VENV)/.modules: FORCE | $(VENV)/bin/python
	@find src -name '*.py' | sort | cmp -s - $@ || find src -name '*.py' | sort >$@

$(VENV)/.flatout: pyproject.toml $(VENV)/.modules $(VENV)/.torch
	$(VENV)/bin/python $(PIP) -c $(VENV)/constraints.txt --no-build-isolation \
	  -C build-dir=$(BUILD) $(CONFIGURE) -e '.[demo]'
	@touch $@

$(VENV)/.native: $(native) $(VENV)/.flatout
	$(VENV)/bin/cmake --build $(BUILD)
	@$(VENV)/bin/cmake --install $(BUILD) --prefix "$$($(VENV)/bin/python -c '$(print_site)')" >/dev/null
	@touch $@

# flatout is installed already: pip adds what its extras name.
$(VENV)/.dev: $(VENV)/.flatout
	$(VENV)/bin/python $(PIP) -c $(VENV)/constraints.txt 'flatout[test,lint]'
	@touch $@

# ---- lint --------------------------------------------------------------------------------------------------

.PHONY: lint-checks lint-format lint-python lint-imports lint-types
lint: $(VENV)/.native $(VENV)/.dev
	+@$(MAKE) --no-print-directory -j$(JOBS) lint-checks

lint-checks: lint-format lint-python lint-imports lint-types $(tidied)

lint-format: $(VENV)/.dev
	$(VENV)/bin/clang-format --dry-run -Werror $(formatted)

lint-python: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

lint-imports: $(VENV)/.dev
	$(VENV)/bin/lint-imports --no-cache --no-logo

lint-types: $(VENV)/.dev
	$(VENV)/bin/mypy

# A file that this build does not compile (CUDA off) has no flags to be read with, and is left out.
build/tidy/%.ok: % $(headers) .clang-tidy $(VENV)/.dev | $(VENV)/.native
	@mkdir -p $(@D)
	@if grep -q '$<"' $(BUILD)/compile_commands.json; then \
	  echo clang-tidy $<; $(VENV)/bin/clang-tidy -p $(BUILD) --quiet $< 2>$@.log || { cat $@.log; exit 1; }; \
	fi
	@touch $@

format: $(VENV)/.dev
	$(VENV)/bin/clang-format -i $(formatted)
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

# ---- one wheel, every torch --------------------------------------------------------------------------------

build/wheel/.done: pyproject.toml $(native) $(python) $(VENV)/.torch
	rm -rf build/wheel
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation -w build/wheel \
	  -C build-dir=build/wheel-build $(CONFIGURE) .
	@touch $@

.PRECIOUS: .venvs/torch-%/.ready
.venvs/torch-%/.ready: constraints.txt pyproject.toml build/wheel/.done
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	grep -v '^torch==' constraints.txt >$(@D)/constraints.txt
	$(@D)/bin/python $(PIP) -c $(@D)/constraints.txt --upgrade pip
	$(@D)/bin/python $(PIP) -c $(@D)/constraints.txt torch==$* \
	  "$$(echo $(CURDIR)/build/wheel/*.whl)[test]"
	$(@D)/bin/python $(PIP) --force-reinstall --no-deps build/wheel/*.whl
	@touch $@

# The sources compile with the headers of each torch, because a GPU machine builds with the torch that it has. The
# tests run in an empty folder, so that they import the installed wheel.
.PHONY: $(TORCHES:%=test-torch-%)
$(TORCHES:%=test-torch-%): test-torch-%: .venvs/torch-%/.ready
	mkdir -p build/torch-$*
	$(VENV)/bin/cmake -S . -B build/torch-$*/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(<D)/bin/python -DFLATOUT_CUDA_ARCHS='$(ARCHS)' \
	  -Dpybind11_DIR=$$($(VENV)/bin/python -m pybind11 --cmakedir)
	$(VENV)/bin/cmake --build build/torch-$*/cmake --target flatout_ops
	cd build/torch-$* && $(CURDIR)/$(<D)/bin/python -c '$(print_flatout)'
	cd build/torch-$* && $(CURDIR)/$(<D)/bin/python -m pytest -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) \
	  -p no:cacheprovider $(PARALLEL) $(ARGS) $(CURDIR)/tests

test-torches: $(TORCHES:%=test-torch-%)

# ---- on a machine with a GPU -------------------------------------------------------------------------------

gpu-check:
	PYTHON='$(PYTHON)' OUT='$(OUT)' PHASES='$(PHASES)' ARGS='$(ARGS)' WHEELS='$(WHEELS)' ARCHS='$(if $(filter file,$(origin ARCHS)),,$(ARCHS))' \
	  bash tools/gpu_check.sh

# Everything that the targets above made, environments included.
clean:
	rm -rf build dist $(VENV) .venvs .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
