// play_cpu.cpp: test-only. The host plays the blocks and threads of the CUDA kernels over the same tables,
// views, splits and thread functions, so that their index arithmetic is proved where there is no GPU.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "optim/step.h"
#include "optim/step_chunk.h"
#include "scaling/check.h"
#include "scaling/check_chunk.h"

namespace flatout {
namespace {

constexpr int kSmallCapacity = 3;  // tensors per table: a handful of tensors needs several "launches"

// adamw_ as step.cu runs it; returns the number of launches. `piece` (a multiple of kChunk) is where the
// tables split large tensors.
int64_t play_adamw_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                    const TensorList& exp_avg_sqs, const TensorList& max_exp_avg_sqs,
                    const TensorList& state_steps, double lr, double weight_decay, int64_t threads,
                    int64_t piece) {
  const AdamStep step = prepare_adamw(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, lr,
                                      std::nullopt, 0.9, 0.999, 1e-8, weight_decay, /*decoupled=*/true,
                                      /*maximize=*/false, std::nullopt, std::nullopt);
  int64_t launches = 0;
  with_rule(step, [&]<class T, class Rule>(T*, Rule*) {
    using Table = TensorTable<Rule::kStreams, kSmallCapacity>;
    for_each_table<Table>(
        step.tensors, sizeof(T),
        [&](const Table& table, uint32_t chunks) {
          ++launches;
          for (uint32_t block = 0; block < chunks; ++block) {
            const auto view = view_chunk<T>(table, block);
            const Rule rule = step.config.at<Rule>(double{*table.step[view.tensor]} + 1);
            for (uint32_t thread = 0; thread < threads; ++thread)
              step_chunk<T, Rule>(view, rule, thread, static_cast<uint32_t>(threads));
          }
        },
        piece);
  });
  for (const FlatTensor& tensor : step.tensors) *tensor.step += 1;
  return launches;
}

// unscale_and_check_ as check.cu runs it: (sum of squares, non-zero when something is not finite).
std::tuple<double, double> play_check_(const TensorList& grads, double inv_scale, int64_t threads,
                                       int64_t piece) {
  const GradCheck check = prepare_check(grads, std::nullopt, std::nullopt);
  Partial total{0, 0};
  with_dtype(check.dtype, [&]<class T>(T*) {
    using Table = TensorTable<1, kSmallCapacity>;
    for_each_table<Table>(
        check.tensors, sizeof(T),
        [&](const Table& table, uint32_t chunks) {
          for (uint32_t block = 0; block < chunks; ++block)
            for (uint32_t thread = 0; thread < threads; ++thread)
              total.add(check_chunk<true, T>(view_chunk<T>(table, block),
                                             static_cast<compute_t<T>>(inv_scale), thread,
                                             static_cast<uint32_t>(threads)));
        },
        piece);
  });
  return {total.sum, total.bad};
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY(flatout_testing, m) {
  m.def(
      "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] state_steps, *, float lr, float weight_decay, int threads, "
      "int piece) -> int");
  m.def("check_(Tensor(a!)[] grads, *, float inv_scale, int threads, int piece) -> (float, float)");
}

STABLE_TORCH_LIBRARY_IMPL(flatout_testing, CPU, m) {
  m.impl("adamw_", TORCH_BOX(&flatout::play_adamw_));
  m.impl("check_", TORCH_BOX(&flatout::play_check_));
}
