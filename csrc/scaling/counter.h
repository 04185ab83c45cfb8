// counter.h: a counter in global memory. The last block of a launch uses the counter to detect that all other
// blocks have finished.
#pragma once

#include <cstdint>

namespace flatout {

// Number of counters in a device's code. Each stream takes one counter, and torch has fewer streams.
inline constexpr uint32_t kKeptCounters = 1024;

// Counter of finished work. Its value is 0 before the first launch and after the last one.
struct Counter {
  uint32_t* own = nullptr;  // null: the kept counter with the number `kept`
  uint32_t kept = 0;
};

}  // namespace flatout
