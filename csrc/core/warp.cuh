// warp.cuh: reductions over the lanes of a warp.
#pragma once

#include <cstdint>

namespace flatout {

inline constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

// The largest value, in all lanes.
__device__ inline uint32_t warp_max(uint32_t value) {
  for (uint32_t distance = 16; distance != 0; distance /= 2)
    value = max(value, __shfl_xor_sync(kWholeWarp, value, distance));
  return value;
}

}  // namespace flatout
