// dynamic8.cu: converts whole tensors into 8 bits and back on CUDA, for optimizer state.
#include "core/warp.cuh"
#include "optim/step_launch.h"

namespace flatout {
namespace {

constexpr uint32_t kWarps = kThreads / kLanes, kPerLane = kDynamicBlock / kLanes;
static_assert(kChunk % kDynamicBlock == 0);

// A CUDA block converts a chunk, and each of its warps one block of numbers at a time.
template <bool Signed>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(const float* values, uint8_t* codes, float* absmax, int64_t count) {
  const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t chunk = int64_t{blockIdx.x} * kChunk;
  const int64_t end = min(chunk + kChunk, count);
  for (int64_t block = chunk + warp * kDynamicBlock; block < end; block += kWarps * kDynamicBlock) {
    float mine[kPerLane];
    uint32_t largest = 0;
    FLATOUT_UNROLL
    for (uint32_t k = 0; k < kPerLane; ++k) {
      const int64_t i = block + k * kLanes + lane;
      mine[k] = i < end ? values[i] : 0;
      largest = max(largest, magnitude_bits(mine[k]));
    }
    const DynamicScale scale = DynamicScale::of(warp_max(largest));
    FLATOUT_UNROLL
    for (uint32_t k = 0; k < kPerLane; ++k) {
      const int64_t i = block + k * kLanes + lane;
      if (i < end) codes[i] = Dynamic8<Signed>::encode(mine[k], scale.inverse);
    }
    if (lane == 0) absmax[block / kDynamicBlock] = scale.absmax;
  }
}

template <bool Signed>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(float* values, const uint8_t* codes, const float* absmax, int64_t count) {
  const int64_t chunk = int64_t{blockIdx.x} * kChunk;
  const int64_t end = min(chunk + kChunk, count);
  for (int64_t i = chunk + threadIdx.x; i < end; i += kThreads)
    values[i] = Dynamic8<Signed>::decode(codes[i], absmax[i / kDynamicBlock]);
}

}  // namespace

void launch_encode(const float* values, uint8_t* codes, float* absmax, int64_t count, bool has_sign,
                   cudaStream_t stream) {
  if (count == 0) return;
  launch("encode_kernel", has_sign ? encode_kernel<true> : encode_kernel<false>, chunks_of(count), kThreads,
         stream, values, codes, absmax, count);
}

void launch_decode(float* values, const uint8_t* codes, const float* absmax, int64_t count, bool has_sign,
                   cudaStream_t stream) {
  if (count == 0) return;
  launch("decode_kernel", has_sign ? decode_kernel<true> : decode_kernel<false>, chunks_of(count), kThreads,
         stream, values, codes, absmax, count);
}

}  // namespace flatout
