// check.h: what the CPU and the CUDA form of unscale + check have in common.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "core/tensors.h"
#include "scaling/norm.h"

namespace flatout {

struct GradCheck {
  std::vector<FlatTensor> tensors;
  ScalarType dtype;
  DeviceScalar inv_scale;
  double max_norm;  // < 0: no clipping
};

inline GradCheck prepare_check(const TensorList& grads, const std::optional<Tensor>& inv_scale,
                               std::optional<double> max_norm) {
  check_leader(grads, "grads");
  STD_TORCH_CHECK(!max_norm.has_value() || *max_norm >= 0, "max_norm must be >= 0, got ",
                  max_norm.value_or(0));
  return {flatten({&grads}, nullptr), grads[0].scalar_type(),
          device_scalar(inv_scale, "inv_scale", grads[0], 1), max_norm.value_or(-1)};
}

// The 0-dim results, uninitialised: found_inf, grad_norm, grad_factor.
inline std::tuple<Tensor, Tensor, Tensor> new_verdict(const Tensor& leader) {
  const ScalarType wide = leader.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  return {torch::stable::new_empty(leader, {}, ScalarType::Float), torch::stable::new_empty(leader, {}, wide),
          torch::stable::new_empty(leader, {}, wide)};
}

}  // namespace flatout
