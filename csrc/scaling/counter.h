// counter.h: the counter in global memory that finds the block that finishes last.
#pragma once

#include <cstdint>

namespace flatout {

// Kept counters are variables in the code of each device, which later calls use again. torch has fewer
// streams than this number.
inline constexpr uint32_t kKeptCounters = 1024;

// A counter is 0 before the first launch and after the last one.
struct Counter {
  uint32_t* own = nullptr;  // null: the kept counter with the number `kept`
  uint32_t kept = 0;
};

}  // namespace flatout
