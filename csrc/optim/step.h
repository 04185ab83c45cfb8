// step.h: what the CPU and the CUDA form of an optimizer step have in common: checked arguments as plain
// data.
#pragma once

#include <optional>

#include "core/tensors.h"
#include "optim/rules.h"

namespace flatout {

struct AdamStep {
  AdamConfig config;
  std::vector<FlatTensor> tensors;
  ScalarType dtype;
  bool amsgrad;
};

struct SgdStep {
  SgdConfig config;
  std::vector<FlatTensor> tensors;
  ScalarType dtype;
  bool momentum, nesterov;
};

inline AdamStep prepare_adamw(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                              const TensorList& exp_avg_sqs, const TensorList& max_exp_avg_sqs,
                              const TensorList& state_steps, double lr,
                              const std::optional<Tensor>& lr_tensor, double beta1, double beta2, double eps,
                              double weight_decay, bool decoupled, bool maximize,
                              const std::optional<Tensor>& grad_factor,
                              const std::optional<Tensor>& found_inf) {
  check_leader(params, "params");
  check_follower(grads, "grads", params, "params");
  check_follower(exp_avgs, "exp_avgs", params, "params");
  check_follower(exp_avg_sqs, "exp_avg_sqs", params, "params");
  check_steps(state_steps, "state_steps", params);
  const bool amsgrad = !max_exp_avg_sqs.empty();
  std::vector<const TensorList*> streams{&params, &grads, &exp_avgs, &exp_avg_sqs};
  if (amsgrad) {
    check_follower(max_exp_avg_sqs, "max_exp_avg_sqs", params, "params");
    streams.push_back(&max_exp_avg_sqs);
  }
  AdamConfig config;
  config.lr = device_scalar(lr_tensor, "lr_tensor", params[0], lr);
  config.grad_factor = device_scalar(grad_factor, "grad_factor", params[0], 1);
  config.found_inf = device_flag(found_inf, "found_inf", params[0]);
  config.beta1 = beta1;
  config.beta2 = beta2;
  config.eps = eps;
  config.weight_decay = weight_decay;
  config.decoupled = decoupled;
  config.maximize = maximize;
  return {config, flatten(streams, &state_steps), params[0].scalar_type(), amsgrad};
}

inline SgdStep prepare_sgd(const TensorList& params, const TensorList& grads,
                           const TensorList& momentum_buffers, const TensorList& steps_taken, double lr,
                           const std::optional<Tensor>& lr_tensor, double momentum, double dampening,
                           double weight_decay, bool nesterov, bool maximize,
                           const std::optional<Tensor>& grad_factor, const std::optional<Tensor>& found_inf) {
  check_leader(params, "params");
  check_follower(grads, "grads", params, "params");
  const bool buffered = !momentum_buffers.empty();
  STD_TORCH_CHECK(buffered || momentum == 0, "momentum_buffers must hold as many tensors as params (",
                  params.size(), ") when momentum is ", momentum, ", got 0");
  std::vector<const TensorList*> streams{&params, &grads};
  if (buffered) {
    check_follower(momentum_buffers, "momentum_buffers", params, "params");
    streams.push_back(&momentum_buffers);
  }
  STD_TORCH_CHECK(!buffered || dampening == 0 || !steps_taken.empty(),
                  "steps_taken must hold as many tensors as params (", params.size(), ") when dampening is ",
                  dampening, ", got 0");
  if (!steps_taken.empty()) check_steps(steps_taken, "steps_taken", params);
  SgdConfig config;
  config.lr = device_scalar(lr_tensor, "lr_tensor", params[0], lr);
  config.grad_factor = device_scalar(grad_factor, "grad_factor", params[0], 1);
  config.found_inf = device_flag(found_inf, "found_inf", params[0]);
  config.momentum = momentum;
  config.dampening = dampening;
  config.weight_decay = weight_decay;
  config.maximize = maximize;
  return {config, flatten(streams, &steps_taken), params[0].scalar_type(), buffered, nesterov};
}

// Calls body with (null pointer of the element type, null pointer of the rule type) for a checked step.
template <class Body>
void with_rule(const AdamStep& step, const Body& body) {
  with_dtype(step.dtype, [&](auto* element) {
    using Acc = compute_t<std::remove_pointer_t<decltype(element)>>;
    step.amsgrad ? body(element, static_cast<AdamRule<Acc, true>*>(nullptr))
                 : body(element, static_cast<AdamRule<Acc, false>*>(nullptr));
  });
}

template <class Body>
void with_rule(const SgdStep& step, const Body& body) {
  with_dtype(step.dtype, [&](auto* element) {
    using Acc = compute_t<std::remove_pointer_t<decltype(element)>>;
    if (!step.momentum) return body(element, static_cast<SgdRule<Acc, false, false>*>(nullptr));
    step.nesterov ? body(element, static_cast<SgdRule<Acc, true, true>*>(nullptr))
                  : body(element, static_cast<SgdRule<Acc, true, false>*>(nullptr));
  });
}

}  // namespace flatout
