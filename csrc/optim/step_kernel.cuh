// step_kernel.cuh: optimizer steps on CUDA: one pass over memory, thousands of tensors per launch, nothing
// read back. Instantiated for one type per file, so that they compile side by side.
#pragma once

#include "optim/step_block.h"
#include "optim/step_launch.h"

namespace flatout {
namespace {

// One block per chunk. Skipping and every coefficient are decided on the device.
template <class T, class Rule, Kind K, class Config>
__global__ void __launch_bounds__(kThreads)
    step_kernel(const __grid_constant__ StepBatch<> batch, const __grid_constant__ StepTable table,
                const __grid_constant__ Config config, const __grid_constant__ Storage storage) {
  if (config.found_inf != nullptr && *config.found_inf != 0) return;
  static_assert(std::is_trivially_default_constructible_v<BlockStart<T, Rule>>,
                "or shared memory is initialised");
  __shared__ BlockStart<T, Rule> start;
  __shared__ bool last;
  if (blockIdx.x < batch.chunks) {
    // Powers and roots in double are slow on most GPUs: once per block.
    if (threadIdx.x == 0) start_block(start, table, batch, blockIdx.x, config, storage);
    __syncthreads();
    step_thread<T, Rule, K>(start, threadIdx.x, blockDim.x);
  }
  // The block that finishes last counts the step: all others have read the old counts.
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(table.ticket, 1u) == gridDim.x - 1;
    if (last) *table.ticket = 0;
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
    step_kernel<T, Rule, K, Config><<<blocks, kThreads, 0, stream>>>(batch, table, config, storage);
    check_cuda(cudaGetLastError(), "launch of step_kernel");
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
      with_kind<T>(storage, common.stochastic, [&](auto kind) {
        launch_batches<T, Rule, decltype(kind)::value>(config, storage, tensors, table, stream);
      });
    });
  });
  return known;
}

}  // namespace flatout
