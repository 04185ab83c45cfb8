// steady_clock.cpp: a std::chrono::steady_clock that stands still until a test advances it (LD_PRELOAD).
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
