// step_kernel.cuh: optimizer steps on CUDA, in one pass over memory and with thousands of tensors per launch.
// The host reads nothing back. Each file step_*.cu instantiates one type, so that the files compile in
// parallel.
#pragma once

#include "core/last_block.cuh"
#include "core/warp.cuh"
#include "optim/step_block.h"
#include "optim/step_launch.h"

namespace flatout {
namespace {

// Threads per block. Small blocks, so that several fit in a multiprocessor: while one block reads its table
// and computes powers, the others move memory. Each thread still works on at least 16 vectors.
template <class T>
constexpr uint32_t kThreadsOf = sizeof(T) == 2 ? 128 : 256;

// Blocks that must fit in a multiprocessor. With more blocks, kernels would spill registers.
template <class T, class Rule, Kind K>
constexpr uint32_t blocks_of() {
  if (kHasCodes<K>) return 256 / kThreadsOf<T>;
  if (kIsFixed<K> && Rule::kStates <= 2 && sizeof(T) <= 4) return sizeof(T) == 2 ? 6 : 4;
  return 512 / kThreadsOf<T>;
}

template <class T, class Rule, Kind K>
__device__ void step_codes(const BlockStart<T, Rule>& start) {
  constexpr uint32_t kWarps = kThreadsOf<T> / kLanes;
  using Warp = CodesWarp<T, Rule, K>;
  alignas(kVectorBytes) __shared__ typename Warp::Staged staged[kWarps];
  const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const Rule rule = start.rule;  // in registers
  const Warp self = Warp::of(start.place, rule, start.extras, staged[warp]);
  const uint32_t blocks = self.blocks();
  for (uint32_t block = warp; block < blocks; block += kWarps) {
    self.decode(block, lane);
    __syncwarp();
    self.step(block, lane);
    __syncwarp();
    FLATOUT_UNROLL
    for (int s = 0; s < Rule::kStates; ++s)
      self.encode(block, lane, s, warp_max(self.largest(block, lane, s)));
  }
}

// Has one block per chunk. The device decides whether the step is skipped, and computes all coefficients.
template <class T, class Rule, Kind K, class Config>
__global__ void __launch_bounds__(kThreadsOf<T>, blocks_of<T, Rule, K>())
    step_kernel(__grid_constant__ Argument<StepBatch<>> batch, __grid_constant__ Argument<StepTable> table,
                __grid_constant__ Argument<Config> config, __grid_constant__ Argument<Storage> storage) {
  // Not used before the block has started, so that this load overlaps the loads of the start.
  const bool skipped = config.found_inf != nullptr && *config.found_inf != 0;
  static_assert(std::is_trivially_default_constructible_v<BlockStart<T, Rule>>,
                "or shared memory is initialized");
  __shared__ BlockStart<T, Rule> start;
  __shared__ bool last;
  const bool has_chunk = blockIdx.x < batch.chunks;
  if (has_chunk && threadIdx.x < kLanes) {
    const uint32_t chunk = chunk_of(batch, blockIdx.x);
    const uint32_t t = warp_tensor_of(table.first_chunk + batch.first_tensor, batch.tensors, chunk);
    // Once per block, because powers and roots in double are slow on most GPUs.
    if (threadIdx.x < kPowers) find_start(start, table, batch, t, chunk, config, threadIdx.x);
    __syncwarp();
    if (threadIdx.x == 0) finish_start(start, config, storage);
  }
  __syncthreads();
  // The last block to come here counts the step, because all other blocks have read the old counts. While one
  // warp waits for the ticket, the others move memory.
  if (threadIdx.x == 0) last = !skipped && finishes_last(table.ticket, 1, gridDim.x);
  if (has_chunk) {
    if (skipped) {
      // A skipped step only unscales gradients, below.
    } else if constexpr (kHasCodes<K>) {
      step_codes<T, Rule, K>(start);
    } else {
      step_thread<T, Rule, K>(start, threadIdx.x, blockDim.x);
    }
    if (start.extras.unscale != 1) {  // the same for all threads of the block
      __syncthreads();                // every thread must have read its gradients
      unscale_thread<T, Rule, K>(start, threadIdx.x, blockDim.x);
    }
  }
  __syncthreads();
  if (last) count_steps(table, batch, threadIdx.x, blockDim.x);
}

template <class T, class Rule, Kind K, class Config>
void launch_batches(const Config& config, const Storage& storage, const std::vector<FlatTensor>& tensors,
                    const StepTable& table, cudaStream_t stream) {
  static_assert(sizeof(StepBatch<>) + sizeof(StepTable) + sizeof(Config) + sizeof(Storage) + 64 <=
                kArgumentBytes);
  for_each_batch<StepBatch<>>(tensors, [&](const StepBatch<>& batch) {
    const uint32_t blocks = batch.chunks == 0 ? 1 : batch.chunks;  // empty tensors count steps, too
    launch("step_kernel", step_kernel<T, Rule, K, Config>, blocks, kThreadsOf<T>, stream, batch, table,
           config, storage);
  });
}

}  // namespace

template <class T>
bool launch_step(RuleName name, int states, const Storage& storage, const StepConfig& common,
                 const std::vector<double>& options, const std::vector<FlatTensor>& tensors,
                 const StepTable& table, cudaStream_t stream) {
  bool known = false;
  with_config(name, common, options, [&](const auto& config) {
    known = config.template with_rule<compute_t<T>>(states, [&](auto* null) {
      using Rule = std::remove_pointer_t<decltype(null)>;
      with_kind<T, Rule>(storage, common.stochastic, [&](auto kind) {
        launch_batches<T, Rule, decltype(kind)::value>(config, storage, tensors, table, stream);
      });
    });
  });
  return known;
}

}  // namespace flatout
