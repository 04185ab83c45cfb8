// library.cpp: the schema of every flatout operator. Kernels register per dispatch key beside their code.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(flatout, m) {
  // Every operator checks its arguments and raises before it changes anything. It checks dtypes, devices,
  // lengths, layouts, shared memory and freed storage.
  //
  // One read of the gradients (of one device, any dtypes): 0-dim tensors on their device. grad_factor =
  // inv_scale x clip coefficient is what the step multiplies each gradient with, in registers. found_inf is
  // float32; grad_norm (of the unscaled gradients, of order 1, 2 or inf) and grad_factor are float32, float64
  // where all gradients are. Without gradients, found_inf and grad_norm are 0, grad_factor is that of a norm
  // of 0, and all are on the device of inv_scale.
  m.def(
      "unscale_and_check(Tensor[] grads, Tensor? inv_scale, float? max_norm, float norm_type=2.0) -> "
      "(Tensor found_inf, Tensor grad_norm, Tensor grad_factor)");
  // The rewriting form, for users' own loops: gradients come back unscaled. Here and in scale_, none may
  // share memory with another.
  m.def("unscale_and_check_(Tensor(a!)[] grads, Tensor? inv_scale) -> (Tensor found_inf, Tensor grad_norm)");
  // Returns the norm of each gradient times inv_scale: [len(grads)]. The dtype and norm_type are those of
  // unscale_and_check. Requires at least one gradient.
  m.def("grad_norms(Tensor[] grads, Tensor? inv_scale, float norm_type=2.0) -> Tensor");
  // grads *= factor; a factor of 1, known to the device only, costs no memory traffic.
  m.def("scale_(Tensor(a!)[] grads, Tensor factor) -> ()");

  // Checks the tensors of optimizer steps once, and returns the number of the bucket that keeps the tensors.
  // `rule` is one of three:
  //   adam  states: exp_avgs, exp_avg_sqs and, with amsgrad, max_exp_avg_sqs; options: beta1, beta2, eps,
  //         decoupled
  //   sgd   states: momentum_buffers or none; options: momentum, dampening, nesterov
  //   lion  states: exp_avgs; options: beta1, beta2
  // All tensors are on one device:
  //   weights   the updated tensors, of one dtype: parameters, their float32 masters, or bfloat16 parameters
  //             whose missing 16 bits are `lows`
  //   states    stream by stream; a stream's dtype is the compute type (float32, float64 of float64 weights)
  //             or 16-bit; or uint8, codes of optim/dynamic8.h
  //   absmaxes  of states in uint8: float32, one per 256 elements in the order of memory
  //   steps     float32 or float64 counts, where needed: adam; sgd with dampening; a seed
  //   averages  of the weights (EMA), in the compute type, or none
  //   lows      float16 or bfloat16: receive the weights rounded; int16: remainders; or none
  //   ids       key a tensor's random bits; none: its position
  // No two tensors may share memory.
  m.def(
      "make_bucket(str rule, Tensor[] weights, Tensor[] states, Tensor[] absmaxes, Tensor[] steps, "
      "Tensor[] averages, Tensor[] lows, int[] ids) -> int");
  m.def("free_bucket(int bucket) -> ()");
  // Sets gradients for the next step, of the weights at the ascending indices `which` ([]: all). They are
  // kept alive until that step, or until a call with empty lists. Returns 0: ready; 1: the bucket's tensors
  // have moved, so make a new bucket; 2: a gradient's shape or strides differ from its weight's; 3: a
  // gradient is not strided, not float or on another device. No storage may be resized between this call and
  // the step.
  m.def("set_grads(int bucket, Tensor[] grads, int[] which) -> int");
  // unscale_and_check of the gradients that are set in buckets of one device. `factor` replaces inv_scale if
  // that is None.
  m.def(
      "check_buckets(int[] buckets, Tensor? inv_scale, float? max_norm, float factor=1.0) -> "
      "(Tensor found_inf, Tensor grad_norm, Tensor grad_factor)");
  // check_buckets with 1 / scale for inv_scale. Writes the results of torch._amp_update_scale_ to next_scale
  // and next_growth_tracker. `skipped` is found_inf as a bool.
  m.def(
      "check_scaled_buckets(int[] buckets, Tensor scale, Tensor growth_tracker, Tensor(a!) next_scale, "
      "Tensor(b!) next_growth_tracker, float growth_factor, float backoff_factor, int growth_interval, "
      "float? max_norm) -> (Tensor found_inf, Tensor grad_norm, Tensor grad_factor, Tensor skipped)");
  // Steps with the gradients that are set, then releases the gradients. A given lr_tensor replaces lr.
  // grad_factor and found_inf are read on the device. A step whose found_inf is not 0 changes none of the
  // bucket's tensors, not even step counts. A seed rounds bfloat16 weights without lows and bfloat16 states
  // stochastically. With unscale_grads, the step also multiplies the gradients in memory by grad_factor and
  // rounds them to their dtype, even if found_inf is not 0. Otherwise the step only reads the gradients.
  m.def(
      "step_bucket_(int bucket, float[] options, *, float lr, Tensor? lr_tensor, float weight_decay, "
      "bool maximize, float ema_decay, int? seed, Tensor? grad_factor, Tensor? found_inf, "
      "bool unscale_grads=False) -> ()");
  // True if no two gradients that are set in these buckets share memory, as unscale_grads requires.
  m.def("grads_are_apart(int[] buckets) -> bool");

  // Converts numbers to optimizer states in uint8, and back. `values` (float32) and `codes` have equal shapes
  // and strides. Without a sign, no positive number becomes 0.
  m.def("encode_(Tensor values, Tensor(a!) codes, Tensor(b!) absmax, bool has_sign) -> ()");
  m.def("decode_(Tensor(a!) values, Tensor codes, Tensor absmax, bool has_sign) -> ()");

  // uint8 images [N, C, H, W] as (x / 255 - mean) / std: each operation rounded to float32, the result to
  // `dtype` (float32, float16, bfloat16). One mean and one std per channel; channels_last or contiguous.
  m.def(
      "normalize_images(Tensor images, float[] mean, float[] std, ScalarType dtype, bool channels_last) -> "
      "Tensor");
}
