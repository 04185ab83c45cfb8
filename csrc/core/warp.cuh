// warp.cuh: a reduction over the lanes of a warp, and a search by a whole warp.
#pragma once

#include "core/chunks.h"

namespace flatout {

inline constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

// Returns the largest value of all lanes to each lane.
__device__ inline uint32_t warp_max(uint32_t value) {
  for (uint32_t distance = 16; distance != 0; distance /= 2)
    value = max(value, __shfl_xor_sync(kWholeWarp, value, distance));
  return value;
}

// tensor_of() by a whole warp. Returns the same tensor to all lanes. Each read waits for the previous one and
// leaves 1/32 of the tensors as candidates. A binary search by one thread would read four times as often.
__device__ inline uint32_t warp_tensor_of(const uint32_t* first_chunk, uint32_t tensors, uint32_t chunk) {
  uint32_t begin = 0, count = tensors;  // candidates: `count` tensors from `begin` on
  while (count > 1) {
    const uint32_t stride = (count + kLanes - 1) / kLanes, at = threadIdx.x % kLanes * stride;
    const bool is_before = at < count && first_chunk[begin + at] <= chunk;
    const auto last =
        31 - static_cast<uint32_t>(__clz(static_cast<int>(__ballot_sync(kWholeWarp, is_before))));
    begin += last * stride;
    count = min(stride, count - last * stride);
  }
  return begin;
}

}  // namespace flatout
