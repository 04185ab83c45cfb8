// step_cuda.cpp: optimizer steps under torch's CUDA key.
#include <torch/csrc/stable/library.h>

#include "core/cuda_glue.h"
#include "optim/step.h"
#include "optim/step_launch.h"

namespace flatout {
namespace {

void adamw_cuda_(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
                 TensorList max_exp_avg_sqs, TensorList state_steps, double lr,
                 std::optional<Tensor> lr_tensor, double beta1, double beta2, double eps, double weight_decay,
                 bool decoupled, bool maximize, std::optional<Tensor> grad_factor,
                 std::optional<Tensor> found_inf) {
  const AdamStep step =
      prepare_adamw(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, lr, lr_tensor, beta1,
                    beta2, eps, weight_decay, decoupled, maximize, grad_factor, found_inf);
  const CudaScope scope(params[0]);
  launch_adamw(step.config, step.tensors, element_of(step.dtype), step.amsgrad, scope.stream());
}

void sgd_cuda_(TensorList params, TensorList grads, TensorList momentum_buffers, TensorList steps_taken,
               double lr, std::optional<Tensor> lr_tensor, double momentum, double dampening,
               double weight_decay, bool nesterov, bool maximize, std::optional<Tensor> grad_factor,
               std::optional<Tensor> found_inf) {
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
