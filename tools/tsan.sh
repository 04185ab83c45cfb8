#!/usr/bin/env bash
# Builds the prefetcher without CUDA under ThreadSanitizer (or: tools/tsan.sh address,undefined) and stresses it.
set -euo pipefail
cd "$(dirname "$0")/.."
sanitizer=${1:-thread}
program=build/stress-${sanitizer//,/-}
mkdir -p build
sources=$(ls csrc/prefetch/*.cpp | grep -v bindings)
# shellcheck disable=SC2086  # a list of files
"${CXX:-g++}" -std=c++20 -O1 -g -fno-omit-frame-pointer "-fsanitize=$sanitizer" -Wall -Wextra -Wno-unused-parameter \
  -Icsrc $sources tests/native/prefetch_stress.cpp -pthread -o "$program"
"$program"
