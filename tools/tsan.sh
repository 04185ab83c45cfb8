#!/usr/bin/env bash
# tools/tsan.sh [thread|address,undefined] [prefetch|step_timer]: builds a part of the native core without CUDA, with
# sanitizers, and runs the stress test tests/native/<part>_stress.cpp.
set -euo pipefail
cd "$(dirname "$0")/.."
sanitizer=${1:-thread}
part=${2:-prefetch}
program=build/stress-$part-${sanitizer//,/-}
# Threads interleave realistically only in optimized code. Without optimization, the other sanitizers see more of the
# source, and compilation takes a third of the time.
optimization=-O0
[[ $sanitizer == thread ]] && optimization=-O1
mkdir -p build
case $part in
  prefetch) sources="$(ls csrc/prefetch/*.cpp | grep -v bindings) csrc/core/fork_guard.cpp" ;;
  step_timer) sources=csrc/mfu/counter.cpp ;;
esac
# shellcheck disable=SC2086  # a list of files
"${CXX:-g++}" -std=c++20 "$optimization" -g -fno-omit-frame-pointer "-fsanitize=$sanitizer" -Wall -Wextra -Wno-unused-parameter \
  -Icsrc $sources "tests/native/${part}_stress.cpp" -pthread -o "$program"
"$program"
