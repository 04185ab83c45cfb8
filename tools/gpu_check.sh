#!/usr/bin/env bash
# Builds flatout for the GPU of this machine and runs everything that needs one: tests, compute-sanitizer,
# benchmarks, demo. Downloads nothing and installs nothing outside its build folder: packages are those of
# $PYTHON, and the wheels in $WHEELS where some are missing. Ends in under nine minutes; what has no time left
# is reported as skipped.
#
#   OUT     where results.json, log.txt, tests.xml, benchmarks.png and demo.{json,html} go
#                                                                            (default build/gpu-check)
#   PYTHON  interpreter that has torch                                       (default python3)
#   WHEELS  folder of wheels to take missing packages from                   (default none)
#   ARCHS   CMake CUDA architectures            (default 90a-real on sm_90, else the GPU's own)
#   BUDGET  seconds for all of it                                            (default 510)
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-python3}
mkdir -p "${OUT:=build/gpu-check}"
out=$(cd "$OUT" && pwd)
site=$root/build/gpu/site
budget=${BUDGET:-510}
logs=$root/build/gpu/logs
mkdir -p "$logs"
phases=$logs/phases.tsv

seconds_left() { echo $((budget - SECONDS)); }

# phase NAME LIMIT COMMAND...: runs it within LIMIT and the budget, logs to NAME.log, notes how it went.
phase() {
  local name=$1 limit=$2 left begun=$SECONDS status
  shift 2
  left=$(seconds_left)
  if ((left < 10)); then
    printf '%s\tskipped\t0\n' "$name" >>"$phases"
    echo "== $name: skipped, the budget of $budget s is spent"
    return 1
  fi
  echo "== $name"
  timeout --kill-after=10 "$((limit < left ? limit : left))" "$@" >"$logs/$name.log" 2>&1
  status=$?
  printf '%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - begun))" >>"$phases"
  tail -n 3 "$logs/$name.log"
  echo "== $name: exit status $status, $((SECONDS - begun)) s"
  return "$status"
}

export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 FLATOUT_FAIL_WITHOUT_GPU=1
[[ -d /usr/local/cuda/bin ]] && PATH=$PATH:/usr/local/cuda/bin
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}

wheels() {
  local missing
  missing=$("$python" - <<'PY'
import importlib.util
needs = {"scikit_build_core": "scikit-build-core", "pybind11": "pybind11", "pytest": "pytest",
         "hypothesis": "hypothesis", "pytest_benchmark": "pytest-benchmark", "rich": "rich", "ninja": "ninja"}
print(*[package for module, package in needs.items() if importlib.util.find_spec(module) is None])
PY
)
  echo "missing packages: ${missing:-none}"
  [[ -z $missing ]] && return 0
  if [[ -z ${WHEELS:-} ]]; then
    echo "not there, and WHEELS names no folder to take them from: what needs them will fail"
    return 0
  fi
  # shellcheck disable=SC2086
  "$python" -m pip install --quiet --no-index --no-deps --find-links "$WHEELS" --upgrade --target "$site" \
    $missing
}

build() {
  local cmake_args=(-C "build-dir=$root/build/gpu/cmake" -C "cmake.define.FLATOUT_CUDA=ON"
    -C "cmake.define.FLATOUT_CUDA_ARCHS=$ARCHS")
  "$python" -m pip install --quiet --no-index --no-build-isolation --no-deps --upgrade --target "$site" \
    "${cmake_args[@]}" . || return
  cd "$out" && "$python" -c 'import flatout._native as n; print("CUDA kernels usable:", n.has_cuda_kernels())'
}

# Outside the source folder, so that what is tested is what was built; the checkout stays as it is.
run_pytest() {
  cd "$out" && "$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -p no:cacheprovider "$@"
}

# Tests marked `sanitize` are small: under compute-sanitizer a kernel runs ten to a hundred times slower.
sanitize() {
  local status
  if ! command -v compute-sanitizer >/dev/null; then
    echo "unsupported: no compute-sanitizer on the PATH"
    return 0
  fi
  # torch's caching allocator would hide an access that is outside its tensor but inside the allocator's pool.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 run_pytest -m sanitize "$root/tests/gpu" --co -q >/dev/null
  status=$?
  ((status == 5)) && { echo "no test is marked sanitize"; return 0; }
  cd "$out" && PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 86 \
    --log-file "$logs/$1.report" "$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" \
    -p no:cacheprovider -q -m sanitize "$root/tests/gpu"
  status=$?
  tail -n 2 "$logs/$1.report"
  if grep -q "Device not supported" "$logs/$1.report"; then
    echo "unsupported: compute-sanitizer refuses this device"
    return 0
  fi
  return "$status"
}

# The files that have something to say about CUDA, one after the other: a slow one costs only its own figures.
benchmarks() {
  local status=0 file
  for file in $(grep -ls cuda "$root"/benchmarks/*.py); do
    run_pytest "$file" -s --benchmark-json "$logs/benchmark-$(basename "$file" .py).json" || status=1
  done
  return "$status"
}

demo() {
  cd "$out" || return
  [[ -e $root/src/flatout/cli || -e $root/src/flatout/cli.py ]] || { echo "no flatout.cli here"; return 0; }
  "$python" -m flatout.cli demo --json "$out/demo.json" --html "$out/demo.html"
}

# `timeout` starts programs, so each phase is this script again with the phase's name.
if [[ -n ${GPU_CHECK_PHASE:-} ]]; then
  "$@"
  exit
fi

rm -f "$logs"/* "$out"/{results.json,log.txt,tests.xml,benchmarks.png,demo.json,demo.html}
: >"$phases"
probe='import torch; print("%d%d" % torch.cuda.get_device_capability())'
capability=$("$python" -c "$probe" 2>"$logs/gpu.log") || {
  echo "no GPU that torch can use here: $(tail -n 1 "$logs/gpu.log")" >&2
  capability=
}
default_archs=${capability:-90a}-real
[[ $capability == 90 ]] && default_archs=90a-real
archs=${ARCHS:-$default_archs}
export GPU_CHECK_PHASE=1 OUT=$out ARCHS=$archs
self=$root/tools/gpu_check.sh

failed=0
phase wheels 60 bash "$self" wheels || failed=1
if phase build 240 bash "$self" build; then
  phase tests 180 bash "$self" run_pytest "$root/tests/gpu" --junitxml "$out/tests.xml" || failed=1
  phase memcheck 120 bash "$self" sanitize memcheck || failed=1
  phase racecheck 60 bash "$self" sanitize racecheck || failed=1
  phase benchmarks 150 bash "$self" benchmarks || failed=1
  phase demo 150 bash "$self" demo || failed=1
else
  failed=1
fi
"$python" "$root/tools/gpu_results.py" "$out" "$logs" "$archs" || failed=1
(cd "$logs" && tail -n +1 -- *.log *.report) >"$out/log.txt" 2>/dev/null
exit "$failed"
