// block_sum.cuh: sums over the threads of a block.
#pragma once

#include "core/last_block.cuh"
#include "core/warp.cuh"
#include "scaling/conclusion.h"

namespace flatout {
namespace {

__device__ uint32_t kept_counters[kKeptCounters];

__device__ uint32_t* address_of(const Counter& counter) {
  return counter.own != nullptr ? counter.own : kept_counters + counter.kept;
}

template <Norm kNorm>
__device__ Partial warp_sum(Partial mine) {
  for (int offset = 16; offset > 0; offset /= 2)
    mine.add<kNorm>(
        {__shfl_down_sync(kWholeWarp, mine.norm, offset), __shfl_down_sync(kWholeWarp, mine.bad, offset)});
  return mine;
}

// One sum per warp of a block.
using WarpSums = Partial[32];

template <Norm kNorm>
__device__ void keep_warp_sum(WarpSums& warps, const Partial& mine) {
  const Partial sum = warp_sum<kNorm>(mine);
  if (threadIdx.x % kLanes == 0) warps[threadIdx.x / kLanes] = sum;
}

// Returns the sum over the block to thread 0. Only the first warp may call this function. blockDim.x is a
// multiple of 32.
template <Norm kNorm>
__device__ Partial sum_of(const WarpSums& warps) {
  return warp_sum<kNorm>(threadIdx.x < blockDim.x / kLanes ? warps[threadIdx.x] : Partial{0, 0});
}

}  // namespace
}  // namespace flatout
