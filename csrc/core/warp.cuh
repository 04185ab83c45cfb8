// warp.cuh: reductions over the lanes of a warp, and a search by all of them.
#pragma once

#include "core/chunks.h"

namespace flatout {

inline constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

// The largest value, in all lanes.
__device__ inline uint32_t warp_max(uint32_t value) {
  for (uint32_t distance = 16; distance != 0; distance /= 2)
    value = max(value, __shfl_xor_sync(kWholeWarp, value, distance));
  return value;
}

// tensor_of() for a whole warp, the same in all lanes. Each of its few reads, which wait for one another,
// leaves a thirty-second of the tensors. A binary search of one thread would read four times as often.
__device__ inline uint32_t warp_tensor_of(const uint32_t* first_chunk, uint32_t tensors, uint32_t chunk) {
  uint32_t begin = 0, count = tensors;  // the tensor is one of these
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
