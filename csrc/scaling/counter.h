// counter.h: a counter in global memory, which finds the block of a launch that finishes last.
#pragma once

#include <cstdint>

namespace flatout {

// Counters in a device's code, one per stream: more than torch has streams.
inline constexpr uint32_t kKeptCounters = 1024;

// The counter is 0 before the first launch and after the last.
struct Counter {
  uint32_t* own = nullptr;  // null: the kept counter with the number `kept`
  uint32_t kept = 0;
};

}  // namespace flatout
