// library.cpp: the schema of every flatout operator. Kernels register per dispatch key beside their code.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(flatout, m) {
  // Every operator raises an error for a wrong argument, before it writes to a tensor. The checks cover
  // dtypes, devices, lengths, layouts, shared memory and freed storage.
  //
  // Reads gradients of one device and of any dtypes once. Returns three 0-dim tensors on this device:
  //   found_inf    float32: 1 if a gradient is inf or NaN, else 0
  //   grad_norm    norm of the unscaled gradients, of order 1, 2 or inf
  //   grad_factor  inv_scale x clip coefficient, the factor of the gradients in the optimizer step
  // grad_norm and grad_factor are float64 if all gradients are float64, else float32. Without gradients,
  // found_inf and grad_norm are 0, and grad_factor is that of a norm of 0. All three are then on the device
  // of inv_scale.
  m.def(
      "unscale_and_check(Tensor[] grads, Tensor? inv_scale, float? max_norm, float norm_type=2.0) -> "
      "(Tensor found_inf, Tensor grad_norm, Tensor grad_factor)");
  // Also unscales the gradients in memory, for users' own loops. Here and in scale_, no two gradients may
  // share memory.
  m.def("unscale_and_check_(Tensor(a!)[] grads, Tensor? inv_scale) -> (Tensor found_inf, Tensor grad_norm)");
  // Returns the norm of each gradient times inv_scale: [len(grads)]. The dtype and norm_type are those of
  // unscale_and_check. Requires at least one gradient.
  m.def("grad_norms(Tensor[] grads, Tensor? inv_scale, float norm_type=2.0) -> Tensor");
  // Multiplies the gradients in memory by `factor`, which is read on the device. A factor of 1 causes no
  // memory traffic.
  m.def("scale_(Tensor(a!)[] grads, Tensor factor) -> ()");

  // Checks the tensors of optimizer steps once, and returns the number of the bucket that keeps the tensors.
  // `rule` is one of three:
  //   adam  states: exp_avgs, exp_avg_sqs and, with amsgrad, max_exp_avg_sqs; options: beta1, beta2, eps,
  //         decoupled
  //   sgd   states: momentum_buffers or none; options: momentum, dampening, nesterov
  //   lion  states: exp_avgs; options: beta1, beta2
  // All tensors are on one device:
  //   weights   the updated tensors, of one dtype: parameters, float32 masters of parameters, or bfloat16
  //             parameters whose missing 16 bits are in `lows`
  //   states    for each weight the first state, then for each weight the second state, and so on. The dtype
  //             is a 16-bit type or the compute type, which is float64 for float64 weights, else float32.
  //             Or all states are uint8, with the codes of optim/dynamic8.h
  //   absmaxes  of states in uint8: float32, one per 256 elements in the order of memory
  //   steps     float32 or float64 step counts. adam, sgd with dampening, and steps with a seed require them
  //   averages  exponential moving averages of the weights, in the compute type, or none
  //   lows      float16 or bfloat16 tensors that receive the rounded weights, int16 remainders, or none
  //   ids       parts of the keys of the tensors' random bits. If empty, the positions in `weights`
  //   groups    indices of the weights' numbers in the lists of step_bucket_, from 0 to 63. If empty, 0
  // No two tensors may share memory.
  m.def(
      "make_bucket(str rule, Tensor[] weights, Tensor[] states, Tensor[] absmaxes, Tensor[] steps, "
      "Tensor[] averages, Tensor[] lows, int[] ids, int[] groups=[]) -> int");
  m.def("free_bucket(int bucket) -> ()");
  // Sets gradients for the next step, for the weights at the ascending indices `which` ([] means all). Keeps
  // the gradients alive until this step, or until a call with empty lists. Returns one of four numbers:
  //   0  the gradients are set
  //   1  tensors of the bucket have moved, so a new bucket is necessary
  //   2  the gradients are set, and some are copies, because their strides differ from those of the weights
  //   3  a gradient is not strided, is on another device, differs from its weight in shape or from the first
  //      gradient in dtype, or has a dtype that the step cannot read
  // No storage may be resized between this call and the step.
  m.def("set_grads(int bucket, Tensor[] grads, int[] which) -> int");
  // Does the work of unscale_and_check for the gradients that are set in buckets of one device. If inv_scale
  // is None, `factor` replaces inv_scale.
  m.def(
      "check_buckets(int[] buckets, Tensor? inv_scale, float? max_norm, float factor=1.0) -> "
      "(Tensor found_inf, Tensor grad_norm, Tensor grad_factor)");
  // Does the work of check_buckets with inv_scale = 1 / scale. Writes the results of torch._amp_update_scale_
  // to next_scale and next_growth_tracker. `skipped` is found_inf as a bool.
  m.def(
      "check_scaled_buckets(int[] buckets, Tensor scale, Tensor growth_tracker, Tensor(a!) next_scale, "
      "Tensor(b!) next_growth_tracker, float growth_factor, float backoff_factor, int growth_interval, "
      "float? max_norm) -> (Tensor found_inf, Tensor grad_norm, Tensor grad_factor, Tensor skipped)");
  // Runs a step with the gradients that are set, then releases the gradients. Each group has a number in
  // `lrs` and weight_decays, and in lr_tensors a tensor that replaces the number in `lrs`, or None. These
  // tensors, grad_factor and found_inf are read on the device. A step whose found_inf is not 0 changes none
  // of the bucket's tensors, not even step counts. A seed rounds bfloat16 weights without lows and bfloat16
  // states stochastically. With unscale_grads, the step also multiplies the gradients in memory by
  // grad_factor and rounds them to their dtype, even if found_inf is not 0. Otherwise the step only reads the
  // gradients.
  m.def(
      "step_bucket_(int bucket, float[] options, float[] lrs, Tensor?[] lr_tensors, "
      "float[] weight_decays, bool maximize, float ema_decay, int? seed, Tensor? grad_factor, "
      "Tensor? found_inf, bool unscale_grads=False) -> ()");
  // True if no two gradients that are set in these buckets share memory, as unscale_grads requires.
  m.def("grads_are_apart(int[] buckets) -> bool");

  // Converts numbers to optimizer states in uint8, and back. `values` (float32) and `codes` have equal shapes
  // and strides. Without a sign, no positive number becomes 0.
  m.def("encode_(Tensor values, Tensor(a!) codes, Tensor(b!) absmax, bool has_sign) -> ()");
  m.def("decode_(Tensor(a!) values, Tensor codes, Tensor absmax, bool has_sign) -> ()");

  // Returns (x / 255 - mean) / std for uint8 images [N, C, H, W]. Each operation is rounded to float32, and
  // the result to `dtype` (float32, float16 or bfloat16). Each channel has one mean and one std. The result
  // is in channels_last or contiguous memory format.
  m.def(
      "normalize_images(Tensor images, float[] mean, float[] std, ScalarType dtype, bool channels_last) -> "
      "Tensor");
  // Crops, resizes, mirrors and normalizes uint8 images [H, W, 3]. The filter is antialiased and bilinear,
  // with the bytes of Pillow. `places` has ten numbers for each image:
  //   top, left, height, width of a box of the image
  //   height, width of the resized box
  //   top, left of a window of the resized box; `out` has the window's size
  //   1 to mirror the window, else 0
  //   1 to resize columns before rows, else 0
  // A result is float32 [3, h, w], (x / 255 - mean) / std, or uint8 [h, w, 3] if mean and std are empty.
  m.def("resample_images(Tensor[] images, int[] places, Tensor(a!)[] out, float[] mean, float[] std) -> ()");
}
