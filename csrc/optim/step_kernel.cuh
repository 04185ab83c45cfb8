// step_kernel.cuh: optimizer steps on CUDA: one pass over memory, hundreds of tensors per launch, nothing
// read back. Instantiated for one type per file, so that they compile side by side.
#pragma once

#include "optim/step_block.h"
#include "optim/step_launch.h"

namespace flatout {
namespace {

// One block per chunk, a table's last chunks first: of a model that fits in one table, the check has read
// their gradients last, and L2 may still hold them. Skipping and every coefficient are decided on the device.
template <class T, class Rule, Kind K, class Config>
__global__ void __launch_bounds__(kThreads)
    step_kernel(const __grid_constant__ StepTable<Rule, K> table, const __grid_constant__ Config config,
                const __grid_constant__ Storage storage, uint32_t* ticket) {
  if (config.found_inf != nullptr && *config.found_inf != 0) return;
  __shared__ BlockStart<T, Rule> start;
  __shared__ bool last;
  const uint32_t chunk = gridDim.x - 1 - blockIdx.x;
  if (chunk < table.chunks()) {
    // Powers and roots in double are slow on most GPUs: once per block.
    if (threadIdx.x == 0) start = block_start<T, Rule, K>(table, chunk, config, storage);
    __syncthreads();
    step_thread<T, Rule, K>(table, start, threadIdx.x, blockDim.x);
  }
  // The block that finishes last counts the step: all others have read the old counts.
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  if (last) count_steps(table, threadIdx.x, blockDim.x);
}

template <class T, class Rule, Kind K, class Config>
void launch_tables(const Config& config, const Storage& storage, const std::vector<FlatTensor>& tensors,
                   uint32_t* ticket, cudaStream_t stream) {
  using Table = StepTable<Rule, K>;
  static_assert(sizeof(Table) + sizeof(Config) + sizeof(Storage) + 64 <= 32764,
                "kernel arguments are limited to 32,764 bytes");
  for_each_table<Table>(tensors, [&](const Table& table) {
    const uint32_t blocks = table.chunks() == 0 ? 1 : table.chunks();  // empty tensors count steps, too
    step_kernel<T, Rule, K, Config><<<blocks, kThreads, 0, stream>>>(table, config, storage, ticket);
    check_cuda(cudaGetLastError(), "launch of step_kernel");
  });
}

}  // namespace

template <class T>
bool launch_step(RuleName name, int states, const Storage& storage, const StepConfig& common,
                 const std::vector<double>& options, const std::vector<FlatTensor>& tensors, uint32_t* ticket,
                 cudaStream_t stream) {
  bool known = false;
  with_config(name, common, options, [&](const auto& config) {
    known = config.template with_rule<compute_t<T>>(states, [&](auto* null) {
      using Rule = std::remove_pointer_t<decltype(null)>;
      with_kind<T>(storage, common.stochastic, [&](auto kind) {
        launch_tables<T, Rule, decltype(kind)::value>(config, storage, tensors, ticket, stream);
      });
    });
  });
  return known;
}

}  // namespace flatout
