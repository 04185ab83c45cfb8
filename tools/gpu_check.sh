#!/usr/bin/env bash
# Builds flatout for the GPU of this machine and runs everything that requires a GPU: tests, benchmarks,
# compute-sanitizer, demo. Downloads nothing, and installs nothing outside its build folder. Packages come from $PYTHON
# and from the wheels in $WHEELS. Ends within nine minutes. Phases without time left are reported as skipped. A second
# call with their names as PHASES runs them. A phase that runs out of time keeps its results so far.
#
#   OUT     folder for results.json, optimize_gpu.json, log.txt, tests.xml, benchmarks.png and demo.{json,html}
#                                                                            (default build/gpu-check)
#   PHASES  phases in the order to run: build, tests, kernels, memcheck, racecheck, demo, or the name of a file in
#           benchmarks. Without build, the others use an earlier build       (default: those of `phases` below)
#   PYTHON  interpreter that has torch                                       (default python3)
#   WHEELS  folder of wheels to install, for packages that $PYTHON lacks     (default none)
#   ARGS    arguments of pytest, as in PHASES=optimize_gpu ARGS="-k resnet50" (default none)
#   ARCHS   CMake CUDA architectures            (default 90a-real on sm_90, else the GPU's own)
#   BUDGET  seconds for all phases together                                  (default 510)
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-python3}
[[ $python == [!/]*/* ]] && python=$root/$python
mkdir -p "${OUT:=build/gpu-check}"
out=$(cd "$OUT" && pwd)
site=$root/build/gpu/site
budget=${BUDGET:-510}
logs=$root/build/gpu/logs
work=$root/build/gpu/work  # outside the source folder, so that the built package runs
mkdir -p "$logs" "$work"
notes=$logs/phases.tsv

# Phases, the most important first, and the maximum of seconds for each.
phases="build tests optimize_gpu update_path kernels memcheck data_path_gpu racecheck normalize_images counting_overhead case_study checklist demo data_parallel"
declare -A limits=([wheels]=60 [build]=240 [tests]=180 [kernels]=150 [optimize_gpu]=260 [memcheck]=90 [racecheck]=60 [demo]=150
  [update_path]=90 [data_path_gpu]=60 [normalize_images]=45 [counting_overhead]=45 [case_study]=110
  [checklist]=120 [data_parallel]=120)

seconds_left() { echo $((budget - SECONDS)); }

# phase NAME LINES COMMAND...: runs the command within its limit and the budget, logs to NAME.log, records the exit
# status, and shows the last LINES lines of the log.
phase() {
  local name=$1 lines=$2 limit=${limits[$1]:-$budget} left begun=$SECONDS status
  shift 2
  left=$(seconds_left)
  if ((left < 10)); then
    printf '%s\tskipped\t0\n' "$name" >>"$notes"
    echo "== $name: skipped, the budget of $budget s is spent"
    return 1
  fi
  echo "== $name"
  timeout --kill-after=30 "$((limit < left ? limit : left))" bash "$self" "$@" >"$logs/$name.log" 2>&1
  status=$?
  printf '%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - begun))" >>"$notes"
  tail -n "$lines" "$logs/$name.log"
  echo "== $name: exit status $status, $((SECONDS - begun)) s"
  (cd "$logs" && tail -n +1 -- *.log *.report) >"$out/log.txt" 2>/dev/null
  return "$status"
}

export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 FLATOUT_FAIL_WITHOUT_GPU=1
[[ -d /usr/local/cuda/bin ]] && PATH=$PATH:/usr/local/cuda/bin
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}

wheels() {
  "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$site" "$WHEELS"/*.whl
}

build() {
  local cmake_args=(-C "build-dir=$root/build/gpu/cmake" -C "cmake.define.FLATOUT_CUDA=ON"
    -C "cmake.define.FLATOUT_CUDA_ARCHS=$ARCHS")
  "$python" -m pip install --quiet --no-index --no-build-isolation --no-deps --upgrade --target "$site" \
    "${cmake_args[@]}" . || return
  cd "$work" && "$python" -c 'import flatout.native as n; print("CUDA kernels usable:", n.has_cuda_kernels())'
}

# `timeout` ends a phase with SIGTERM. pytest then writes its results so far, as after Ctrl-C.
interruptible='import signal, sys, pytest
signal.signal(signal.SIGTERM, signal.default_int_handler)
sys.exit(pytest.main(sys.argv[1:]))'

run_pytest() {
  local more
  read -ra more <<<"${ARGS:-}"
  cd "$work" && "$python" -c "$interruptible" -c "$root/pyproject.toml" --rootdir "$root" -p no:cacheprovider \
    "$@" "${more[@]}"
}

# Runs the cases of the kernels on the GPU, without torch. CI runs the same cases on an emulated device.
kernels() {
  cmake --build "$root/build/gpu/cmake" --target device_kernels && "$root/build/gpu/cmake/device_kernels"
}

# Tests marked `sanitize` are small, because kernels run ten to a hundred times slower under compute-sanitizer.
sanitize() {
  local status
  if ! command -v compute-sanitizer >/dev/null; then
    echo "unsupported: no compute-sanitizer on the PATH"
    return 0
  fi
  # torch's caching allocator would hide an access outside of a tensor but inside the allocator's pool.
  cd "$work" && PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 86 \
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

demo() {
  cd "$work" && "$python" -m flatout demo --json "$out/demo.json" --html "$out/demo.html"
}

# `timeout` can start only programs, so each phase is another call of this script. This call ignores the SIGTERM that
# ends its program, so that the next phase does not begin before the program has ended.
if [[ -n ${GPU_CHECK_PHASE:-} ]]; then
  trap : TERM
  "$@"
  exit
fi

for name in ${PHASES:=$phases}; do
  if [[ ! $name =~ ^(build|tests|kernels|memcheck|racecheck|demo)$ && ! -e $root/benchmarks/$name.py ]]; then
    echo "PHASES must name build, tests, kernels, memcheck, racecheck, demo or files in benchmarks, got $name" >&2
    exit 2
  fi
done
rm -f "$logs"/* "$out"/{results.json,optimize_gpu.json,log.txt,tests.xml,benchmarks.png,demo.json,demo.html}
: >"$notes"
probe='import torch; p = torch.cuda.get_device_properties(0); print(f"{p.major}{p.minor}", p.total_memory >> 33)'
read -r capability rooms < <("$python" -c "$probe" 2>"$logs/gpu.log") || {
  echo "no GPU that torch can use here: $(tail -n 1 "$logs/gpu.log")" >&2
  capability=
}
default_archs=${capability:-90a}-real
[[ $capability == 90 ]] && default_archs=90a-real
archs=${ARCHS:-$default_archs}
export GPU_CHECK_PHASE=1 OUT=$out ARCHS=$archs
self=$root/tools/gpu_check.sh

failed=0
for name in $PHASES; do
  case $name in
    build) if [[ -n ${WHEELS:-} ]]; then phase wheels 3 wheels || failed=1; fi; phase build 3 build || { failed=1; break; } ;;
    tests) # One process for two cores and 8 GiB of the GPU. A test that hangs prints its stack.
      processes=$(($(nproc) / 2 < ${rooms:-0} ? $(nproc) / 2 : ${rooms:-0}))
      parallel=()
      "$python" -c 'import xdist' 2>/dev/null && parallel=(-n "$processes" --dist worksteal)
      phase tests 12 run_pytest "$root/tests/gpu" "${parallel[@]}" --junitxml "$out/tests.xml" \
        -o faulthandler_timeout=100 || failed=1 ;;
    kernels) phase kernels 3 kernels || failed=1 ;;
    memcheck | racecheck) phase "$name" 3 sanitize "$name" || failed=1 ;;
    demo) phase demo 3 demo || failed=1 ;;
    *) # only the GPU cases of files with cases for CPU and GPU
      only=()
      [[ $name =~ ^(update_path|normalize_images)$ ]] && only=(-k cuda)
      phase "$name" 60 run_pytest "$root/benchmarks/$name.py" -s -q --full "${only[@]}" \
        --benchmark-json "$logs/benchmark-$name.json" || failed=1 ;;
  esac
done
"$python" "$root/tools/gpu_results.py" "$out" "$logs" "$archs" || failed=1
exit "$failed"
