// step_cuda.cpp: optimizer steps under torch's CUDA key.
#include <torch/csrc/stable/library.h>

#include "core/cuda_glue.h"
#include "optim/step.h"
#include "optim/step_launch.h"

namespace flatout {
namespace {

void adamw_cuda_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                 const TensorList& exp_avg_sqs, const TensorList& max_exp_avg_sqs,
                 const TensorList& state_steps, double lr, const std::optional<Tensor>& lr_tensor,
                 double beta1, double beta2, double eps, double weight_decay, bool decoupled, bool maximize,
                 const std::optional<Tensor>& grad_factor, const std::optional<Tensor>& found_inf) {
  const AdamStep step =
      prepare_adamw(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, lr, lr_tensor, beta1,
                    beta2, eps, weight_decay, decoupled, maximize, grad_factor, found_inf);
  const CudaScope scope(params[0]);
  launch_adamw(step.config, step.tensors, element_of(step.dtype), step.amsgrad, scope.stream());
}

void sgd_cuda_(const TensorList& params, const TensorList& grads, const TensorList& momentum_buffers,
               const TensorList& steps_taken, double lr, const std::optional<Tensor>& lr_tensor,
               double momentum, double dampening, double weight_decay, bool nesterov, bool maximize,
               const std::optional<Tensor>& grad_factor, const std::optional<Tensor>& found_inf) {
  const SgdStep step = prepare_sgd(params, grads, momentum_buffers, steps_taken, lr, lr_tensor, momentum,
                                   dampening, weight_decay, nesterov, maximize, grad_factor, found_inf);
  const CudaScope scope(params[0]);
  launch_sgd(step.config, step.tensors, element_of(step.dtype), step.momentum, step.nesterov, scope.stream());
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CUDA, m) {
  m.impl("adamw_", TORCH_BOX(&flatout::adamw_cuda_));
  m.impl("sgd_", TORCH_BOX(&flatout::sgd_cuda_));
}
