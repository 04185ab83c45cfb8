// play_cpu.cpp: test-only. The host plays the blocks and threads of the CUDA step over the same tables and
// thread functions, so that its index arithmetic is proved where there is no GPU.
#include <torch/csrc/stable/library.h>

#include "optim/buckets.h"
#include "optim/step_block.h"

namespace flatout {
namespace {

constexpr int kSmallCapacity = 3;  // tensors per batch: a handful of tensors needs several "launches"

class PlayedBucket final : public Bucket {
 public:
  using Bucket::Bucket;
  CheckResult check(const Check& check) const override { return check_on_cpu(check, leader()); }

  uint32_t threads = 1;
  int64_t launches = 0;

 private:
  void run(RuleName name, int states, ScalarType dtype, const Storage& storage, const StepConfig& common,
           const std::vector<double>& options, const std::vector<FlatTensor>& tensors) override {
    with_config(name, common, options, [&](const auto& config) {
      with_dtype(dtype, [&]<class T>(T*) {
        config.template with_rule<compute_t<T>>(states, [&]<class Rule>(Rule*) {
          with_kind<T, Rule>(storage, common.stochastic, [&](auto kind) {
            play<T, Rule, decltype(kind)::value>(config, storage, tensors);
          });
        });
      });
    });
  }

  template <class T, class Rule, Kind K>
  static void play_codes(const BlockStart<T, Rule>& start) {
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
  void play(const Config& config, const Storage& storage, const std::vector<FlatTensor>& tensors) {
    std::vector<char> image = table_image(tensors);
    const StepTable table = table_at(image.data(), tensors.size());
    const bool skipped = config.found_inf != nullptr && *config.found_inf != 0;
    for_each_batch<StepBatch<kSmallCapacity>>(tensors, [&](const auto& batch) {
      ++launches;
      for (uint32_t block = 0; block < batch.chunks; ++block) {
        BlockStart<T, Rule> start;
        start_block(start, table, batch, block, config, storage);
        if (skipped) {
          // A skipped step only unscales gradients, below.
        } else if constexpr (kHasCodes<K>) {
          play_codes<T, Rule, K>(start);
        } else {
          for (uint32_t thread = 0; thread < threads; ++thread)
            step_thread<T, Rule, K>(start, thread, threads);
        }
        if (start.extras.unscale != 1)
          for (uint32_t thread = 0; thread < threads; ++thread) unscale_thread(start, thread, threads);
      }
      if (skipped) return;
      for (uint32_t thread = 0; thread < threads; ++thread) count_steps(table, batch, thread, threads);
    });
  }
};

// step_ as step_kernel.cuh runs it; returns the number of launches.
int64_t play_step_(const std::string& rule, const TensorList& weights, const TensorList& grads,
                   const TensorList& states, const TensorList& absmaxes, const TensorList& steps,
                   const TensorList& averages, const TensorList& lows, const std::vector<int64_t>& ids,
                   const std::vector<double>& options, double lr, double weight_decay, bool maximize,
                   double ema_decay, std::optional<int64_t> seed, const std::optional<Tensor>& grad_factor,
                   const std::optional<Tensor>& found_inf, bool unscale_grads, int64_t threads) {
  PlayedBucket bucket(rule, weights, states, absmaxes, steps, averages, lows, ids);
  bucket.threads = static_cast<uint32_t>(threads);
  step_once(bucket, grads,
            {options, lr, std::nullopt, weight_decay, maximize, ema_decay, seed, grad_factor, found_inf,
             unscale_grads});
  return bucket.launches;
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_FRAGMENT(flatout_testing, m) {
  m.def(
      "step_(str rule, Tensor(a!)[] weights, Tensor(g!)[] grads, Tensor(b!)[] states, "
      "Tensor(c!)[] absmaxes, Tensor(d!)[] steps, Tensor(e!)[] averages, Tensor(f!)[] lows, int[] ids, "
      "float[] options, *, float lr, float weight_decay, bool maximize, float ema_decay, int? seed, "
      "Tensor? grad_factor=None, Tensor? found_inf=None, bool unscale_grads=False, int threads) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(flatout_testing, CPU, m) { m.impl("step_", TORCH_BOX(&flatout::play_step_)); }
