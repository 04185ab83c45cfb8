// library.cpp: the schema of every flatout operator. Kernels register per dispatch key beside their code.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(flatout, m) {
  // One read of the gradients: (found_inf, grad_norm, grad_factor), each a 0-dim float32 tensor on their
  // device. grad_factor = inv_scale * clip coefficient is what the step multiplies each gradient with, in
  // registers.
  m.def(
      "unscale_and_check(Tensor[] grads, Tensor? inv_scale, float? max_norm) -> "
      "(Tensor found_inf, Tensor grad_norm, Tensor grad_factor)");
  // The rewriting form, for users' own loops: gradients come back unscaled; (found_inf, grad_norm).
  m.def("unscale_and_check_(Tensor(a!)[] grads, Tensor? inv_scale) -> (Tensor found_inf, Tensor grad_norm)");

  // One optimizer step over many tensors. grad_factor and found_inf are read on the device: a step whose
  // found_inf is set changes nothing, the step count included.
  m.def(
      "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] state_steps, *, float lr, Tensor? lr_tensor, float beta1, "
      "float beta2, float eps, float weight_decay, bool decoupled, bool amsgrad, bool maximize, "
      "Tensor? grad_factor, Tensor? found_inf) -> ()");
  m.def(
      "sgd_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, *, float lr, Tensor? "
      "lr_tensor, "
      "float momentum, float dampening, float weight_decay, bool nesterov, bool maximize, bool first_step, "
      "Tensor? grad_factor, Tensor? found_inf) -> ()");
}
