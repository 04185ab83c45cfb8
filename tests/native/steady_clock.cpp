// steady_clock.cpp: std::chrono::steady_clock that only a test advances, loaded with LD_PRELOAD.
#include <atomic>
#include <chrono>
#include <cstdint>

namespace {

std::atomic<std::int64_t> now_ns{0};

}  // namespace

std::chrono::steady_clock::time_point std::chrono::steady_clock::now() noexcept {
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(now_ns.load()));
}

extern "C" void advance_steady_clock(std::int64_t nanoseconds) { now_ns += nanoseconds; }
