// step.cu: optimizer steps on CUDA: one pass over memory, hundreds of tensors per launch, nothing read back.
#include <algorithm>

#include "optim/step_chunk.h"
#include "optim/step_launch.h"

namespace flatout {
namespace {

// One block per chunk. Skipping and every coefficient are decided on the device.
template <class T, class Rule, class Table, class Config>
__global__ void __launch_bounds__(kThreads)
    step_kernel(const __grid_constant__ Table table, const __grid_constant__ Config config) {
  if (config.found_inf != nullptr && *config.found_inf != 0) return;
  __shared__ Rule shared;
  const ChunkView<T, Rule::kStreams> view = view_chunk<T>(table, blockIdx.x);
  if (threadIdx.x == 0) {
    // Powers and roots in double are slow on most GPUs: once per block. Without a count no step is the first.
    const float* step = table.step[view.tensor];
    shared = config.template at<Rule>(step != nullptr ? static_cast<double>(*step) + 1 : 2.0);
  }
  __syncthreads();
  step_chunk<T, Rule>(view, Rule(shared), threadIdx.x, blockDim.x);
}

struct CountTable {
  static constexpr int kCapacity = 4000;  // 32,000 bytes of kernel arguments
  float* step[kCapacity];
  uint32_t count;
};

// A launch of its own, after the steps: their blocks read the old count.
__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ CountTable table, const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0) return;
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < table.count) *table.step[i] += 1;
}

void launch_counts(const std::vector<FlatTensor>& tensors, const float* found_inf, cudaStream_t stream) {
  CountTable table;
  table.count = 0;
  const auto flush = [&] {
    if (table.count == 0) return;
    count_kernel<<<(table.count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(table, found_inf);
    check_cuda(cudaGetLastError(), "launch of count_kernel");
    table.count = 0;
  };
  for (const FlatTensor& tensor : tensors) {
    if (tensor.step == nullptr) continue;
    if (table.count == CountTable::kCapacity) flush();
    table.step[table.count++] = tensor.step;
  }
  flush();
}

template <class T, class Rule, class Config>
void launch_steps(const Config& config, const std::vector<FlatTensor>& tensors, cudaStream_t stream) {
  using Table = TensorTable<Rule::kStreams, kTableCapacity<Rule::kStreams>>;
  static_assert(sizeof(Table) + sizeof(Config) <= 32764, "kernel arguments are limited to 32,764 bytes");
  for_each_table<Table>(tensors, sizeof(T), [&](const Table& table, uint32_t chunks) {
    step_kernel<T, Rule, Table, Config><<<chunks, kThreads, 0, stream>>>(table, config);
    check_cuda(cudaGetLastError(), "launch of step_kernel");
  });
  launch_counts(tensors, config.found_inf, stream);
}

template <class T>
void launch_adamw_as(const AdamConfig& config, const std::vector<FlatTensor>& tensors, bool amsgrad,
                     cudaStream_t stream) {
  using Acc = compute_t<T>;
  if (amsgrad) return launch_steps<T, AdamRule<Acc, true>>(config, tensors, stream);
  launch_steps<T, AdamRule<Acc, false>>(config, tensors, stream);
}

template <class T>
void launch_sgd_as(const SgdConfig& config, const std::vector<FlatTensor>& tensors, bool momentum,
                   bool nesterov, cudaStream_t stream) {
  using Acc = compute_t<T>;
  if (!momentum) return launch_steps<T, SgdRule<Acc, false, false>>(config, tensors, stream);
  if (nesterov) return launch_steps<T, SgdRule<Acc, true, true>>(config, tensors, stream);
  launch_steps<T, SgdRule<Acc, true, false>>(config, tensors, stream);
}

}  // namespace

void launch_adamw(const AdamConfig& config, const std::vector<FlatTensor>& tensors, Element element,
                  bool amsgrad, cudaStream_t stream) {
  switch (element) {
    case Element::kFloat:
      return launch_adamw_as<float>(config, tensors, amsgrad, stream);
    case Element::kDouble:
      return launch_adamw_as<double>(config, tensors, amsgrad, stream);
    case Element::kHalf:
      return launch_adamw_as<f16>(config, tensors, amsgrad, stream);
    case Element::kBfloat:
      return launch_adamw_as<bf16>(config, tensors, amsgrad, stream);
  }
}

void launch_sgd(const SgdConfig& config, const std::vector<FlatTensor>& tensors, Element element,
                bool momentum, bool nesterov, cudaStream_t stream) {
  switch (element) {
    case Element::kFloat:
      return launch_sgd_as<float>(config, tensors, momentum, nesterov, stream);
    case Element::kDouble:
      return launch_sgd_as<double>(config, tensors, momentum, nesterov, stream);
    case Element::kHalf:
      return launch_sgd_as<f16>(config, tensors, momentum, nesterov, stream);
    case Element::kBfloat:
      return launch_sgd_as<bf16>(config, tensors, momentum, nesterov, stream);
  }
}

}  // namespace flatout
