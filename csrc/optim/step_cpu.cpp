// step_cpu.cpp: optimizer steps on the CPU: one pass over memory, all cores, widest vectors.
#include <torch/csrc/stable/library.h>

#include "core/cpu.h"
#include "core/staging.h"
#include "optim/step.h"

namespace flatout {
namespace {

// The loop itself. The rule is a local copy and the streams are restrict, so that it vectorises.
template <class Rule, class T>
FLATOUT_HD void apply(const Rule rule, T* const (&stream)[Rule::kStreams], uint32_t count) {
  T* __restrict p = stream[0];
  const T* __restrict g = stream[1];
  T* __restrict a = stream[Rule::kStreams > 2 ? 2 : 0];
  T* __restrict b = stream[Rule::kStreams > 3 ? 3 : 0];
  T* __restrict c = stream[Rule::kStreams > 4 ? 4 : 0];
#pragma GCC ivdep
  for (uint32_t i = 0; i < count; ++i) {
    T x[Rule::kStreams];
    x[0] = p[i];
    x[1] = g[i];
    if constexpr (Rule::kStreams > 2) x[2] = a[i];
    if constexpr (Rule::kStreams > 3) x[3] = b[i];
    if constexpr (Rule::kStreams > 4) x[4] = c[i];
    rule(x);
    p[i] = x[0];
    if constexpr (Rule::kStreams > 2) a[i] = x[2];
    if constexpr (Rule::kStreams > 3) b[i] = x[3];
    if constexpr (Rule::kStreams > 4) c[i] = x[4];
  }
}

// One chunk of one tensor.
template <class T, class Rule>
struct StepChunk {
  Rule rule;
  T* stream[Rule::kStreams];
  uint32_t count;

  [[gnu::always_inline]] void operator()() const {
    if constexpr (std::is_same_v<T, typename Rule::acc>) {
      apply(rule, stream, count);
    } else {
      alignas(64) float buffer[Rule::kStreams][kBlock];
      float* staged[Rule::kStreams];
      for (int s = 0; s < Rule::kStreams; ++s) staged[s] = buffer[s];
      for (uint32_t begin = 0; begin < count; begin += kBlock) {
        const uint32_t n = begin + kBlock < count ? kBlock : count - begin;
        for (int s = 0; s < Rule::kStreams; ++s) widen(stream[s] + begin, staged[s], n);
        apply(rule, staged, n);
        for (int s = 0; s < Rule::kStreams; ++s)
          if (s != 1) narrow(staged[s], stream[s] + begin, n);  // gradients stay as they are
      }
    }
  }
};

// The rule of each tensor; neighbours mostly share a step count, so the powers are taken once.
template <class Rule, class Config>
std::vector<Rule> rules_of(const Config& config, const std::vector<FlatTensor>& tensors) {
  const auto next_step = [](const FlatTensor& tensor) {
    return tensor.step ? double{*tensor.step} + 1 : 2.0;
  };
  std::vector<Rule> rules;
  rules.reserve(tensors.size());
  for (size_t t = 0; t < tensors.size(); ++t) {
    const bool same = t > 0 && next_step(tensors[t]) == next_step(tensors[t - 1]);
    rules.push_back(same ? rules.back() : config.template at<Rule>(next_step(tensors[t])));
  }
  return rules;
}

template <class Step>
void run_step(const Step& step) {
  if (step.config.found_inf != nullptr && *step.config.found_inf != 0) return;
  const std::vector<uint32_t> first = first_chunks(step.tensors);
  with_rule(step, [&]<class T, class Rule>(T*, Rule*) {
    const std::vector<Rule> rules = rules_of<Rule>(step.config, step.tensors);
    for_each_chunk(step.tensors, first, [&](uint32_t t, int64_t begin, uint32_t count, uint32_t) {
      StepChunk<T, Rule> chunk{rules[t], {}, count};
      for (int s = 0; s < Rule::kStreams; ++s)
        chunk.stream[s] = static_cast<T*>(step.tensors[t].address[s]) + begin;
      run_vectorised(chunk);
    });
  });
  for (const FlatTensor& tensor : step.tensors)
    if (tensor.step != nullptr) *tensor.step += 1;
}

void adamw_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
            const TensorList& exp_avg_sqs, const TensorList& max_exp_avg_sqs, const TensorList& state_steps,
            double lr, const std::optional<Tensor>& lr_tensor, double beta1, double beta2, double eps,
            double weight_decay, bool decoupled, bool maximize, const std::optional<Tensor>& grad_factor,
            const std::optional<Tensor>& found_inf) {
  run_step(prepare_adamw(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, lr, lr_tensor,
                         beta1, beta2, eps, weight_decay, decoupled, maximize, grad_factor, found_inf));
}

void sgd_(const TensorList& params, const TensorList& grads, const TensorList& momentum_buffers,
          const TensorList& steps_taken, double lr, const std::optional<Tensor>& lr_tensor, double momentum,
          double dampening, double weight_decay, bool nesterov, bool maximize,
          const std::optional<Tensor>& grad_factor, const std::optional<Tensor>& found_inf) {
  run_step(prepare_sgd(params, grads, momentum_buffers, steps_taken, lr, lr_tensor, momentum, dampening,
                       weight_decay, nesterov, maximize, grad_factor, found_inf));
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CPU, m) {
  m.impl("adamw_", TORCH_BOX(&flatout::adamw_));
  m.impl("sgd_", TORCH_BOX(&flatout::sgd_));
}
