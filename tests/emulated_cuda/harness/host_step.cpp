// host_step.cpp: optimizer steps on the host, with the blocks of step_kernel.cuh.
#include <algorithm>

#include "core/cuda_launch.h"
#include "host.h"
#include "optim/step_block.h"

namespace harness {

using namespace flatout;

namespace {

template <class T, class Rule, Kind K>
void step_codes(const BlockStart<T, Rule>& start) {
  using Warp = CodesWarp<T, Rule, K>;
  alignas(kVectorBytes) typename Warp::Staged staged;
  const Warp warp = Warp::of(start.place, start.rule, start.extras, staged);
  for (uint32_t block = 0; block < warp.blocks(); ++block) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) warp.decode(block, lane);
    for (uint32_t lane = 0; lane < kLanes; ++lane) warp.step(block, lane);
    for (int s = 0; s < Rule::kStates; ++s) {
      uint32_t largest = 0;
      for (uint32_t lane = 0; lane < kLanes; ++lane)
        largest = std::max(largest, warp.largest(block, lane, s));
      for (uint32_t lane = 0; lane < kLanes; ++lane) warp.encode(block, lane, s, largest);
    }
  }
}

template <class T, class Rule, Kind K, class Config>
void step(const Config& config, const Storage& storage, const std::vector<FlatTensor>& tensors) {
  constexpr uint32_t kWidth = kThreads;
  std::vector<char> image = table_image(tensors);
  const StepTable table = table_at(image.data(), tensors.size());
  const bool skipped = config.found_inf != nullptr && *config.found_inf != 0;
  for_each_batch<StepBatch<>>(tensors, [&](const auto& batch) {
    for (uint32_t block = 0; block < batch.chunks; ++block) {
      BlockStart<T, Rule> start;
      const uint32_t chunk = chunk_of(batch, block);
      const uint32_t t = tensor_of(table.first_chunk + batch.first_tensor, batch.tensors, chunk);
      for (uint32_t lane = 0; lane < kPowers; ++lane) find_start(start, table, batch, t, chunk, config, lane);
      finish_start(start, config, storage);
      if (skipped) {
        // A skipped step only unscales gradients, below.
      } else if constexpr (kHasCodes<K>) {
        step_codes<T, Rule, K>(start);
      } else {
        for (uint32_t thread = 0; thread < kWidth; ++thread) step_thread<T, Rule, K>(start, thread, kWidth);
      }
      if (start.extras.unscale == 1) continue;
      for (uint32_t thread = 0; thread < kWidth; ++thread) unscale_thread<T, Rule, K>(start, thread, kWidth);
    }
    if (!skipped) count_steps(table, batch, 0, 1);
  });
}

}  // namespace

template <class T>
void step_on_host(RuleName name, int states, const Storage& storage, const StepConfig& common,
                  const std::vector<double>& options, const std::vector<FlatTensor>& tensors) {
  with_config(name, common, options, [&](const auto& config) {
    config.template with_rule<compute_t<T>>(states, [&]<class Rule>(Rule*) {
      with_kind<T, Rule>(storage, common.stochastic,
                         [&](auto kind) { step<T, Rule, decltype(kind)::value>(config, storage, tensors); });
    });
  });
}

#define INSTANTIATE(T)                                                            \
  template void step_on_host<T>(RuleName, int, const Storage&, const StepConfig&, \
                                const std::vector<double>&, const std::vector<FlatTensor>&)
INSTANTIATE(float);
INSTANTIATE(double);
INSTANTIATE(f16);
INSTANTIATE(bf16);

}  // namespace harness
