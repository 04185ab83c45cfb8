// library.cpp: the schema of every flatout operator. Kernels register per dispatch key beside their code.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(flatout, m) {
  // One read of the gradients (of one dtype and device): 0-dim tensors on their device. grad_factor =
  // inv_scale x clip coefficient is what the step multiplies each gradient with, in registers. found_inf is
  // float32; grad_norm (of the unscaled gradients) and grad_factor are float32, float64 for float64
  // gradients.
  m.def(
      "unscale_and_check(Tensor[] grads, Tensor? inv_scale, float? max_norm) -> "
      "(Tensor found_inf, Tensor grad_norm, Tensor grad_factor)");
  // The rewriting form, for users' own loops: gradients come back unscaled; (found_inf, grad_norm).
  m.def("unscale_and_check_(Tensor(a!)[] grads, Tensor? inv_scale) -> (Tensor found_inf, Tensor grad_norm)");
  // grads *= factor; a factor of 1, known to the device only, costs no memory traffic.
  m.def("scale_(Tensor(a!)[] grads, Tensor factor) -> ()");

  // One optimizer step over many tensors of one dtype and device. lr_tensor, where given, wins over lr.
  // grad_factor and found_inf are read on the device: a step whose found_inf is set changes nothing, step
  // counts included. amsgrad is on when max_exp_avg_sqs is not empty.
  m.def(
      "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] state_steps, *, float lr, Tensor? lr_tensor, float beta1, "
      "float beta2, float eps, float weight_decay, bool decoupled, bool maximize, "
      "Tensor? grad_factor, Tensor? found_inf) -> ()");
  // No momentum_buffers: plain SGD. steps_taken (float32 counts) may be empty when dampening is 0: with
  // buffers that start as zeros, only dampening makes the first step taken differ from the others.
  m.def(
      "sgd_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] steps_taken, *, "
      "float lr, Tensor? lr_tensor, float momentum, float dampening, float weight_decay, bool nesterov, "
      "bool maximize, Tensor? grad_factor, Tensor? found_inf) -> ()");
}
