// check.h: arguments and results of unscale + check, for the CPU and for CUDA.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <map>
#include <tuple>

#include "core/tensors.h"
#include "scaling/loss_scale.h"
#include "scaling/norm.h"

namespace flatout {

// Gradients of one dtype, in address[0] of each tensor.
struct GradList {
  const std::vector<FlatTensor>* tensors;
  ScalarType dtype;
};

// A check of gradients of one device. All lists share one verdict.
struct Check {
  std::vector<GradList> lists;
  Unscaling unscaling;
  double max_norm = -1;  // < 0: no clipping
  Norm norm = Norm::kTwo;
  bool rewrite = false;  // unscales the gradients in memory; the norm is of order 2
};

// found_inf, grad_norm and grad_factor, 0-dim on the device of `leader`. found_inf is float32. The other two
// have the dtype of norms.
using CheckResult = std::tuple<Tensor, Tensor, Tensor>;
CheckResult check_on_cpu(const Check& check, const Tensor& leader);
CheckResult check_on_cuda(const Check& check, const Tensor& leader);

// Multiplies gradients of one dtype at address[slot] in place.
void scale_on_cpu(const std::vector<FlatTensor>& tensors, int slot, ScalarType dtype, double factor);

// The dtype of norms: float64 only if all gradients are float64.
inline ScalarType norm_dtype(const Check& check) {
  const bool wide = !check.lists.empty() &&
                    std::all_of(check.lists.begin(), check.lists.end(),
                                [](const GradList& list) { return list.dtype == ScalarType::Double; });
  return wide ? ScalarType::Double : ScalarType::Float;
}

// Returns the result tensors, uninitialized.
inline CheckResult new_verdict(const Check& check, const Tensor& leader) {
  const ScalarType dtype = norm_dtype(check);
  return {new_tensor(leader, ScalarType::Float), new_tensor(leader, dtype), new_tensor(leader, dtype)};
}

// Returns a tensor for one norm per gradient, uninitialized.
inline Tensor new_norms(const Check& check, const TensorList& grads) {
  const int64_t size[] = {static_cast<int64_t>(grads.size())};
  return torch::stable::new_empty(grads[0], {size, 1}, norm_dtype(check));
}

inline VerdictAddress address_of(const CheckResult& result) {
  const auto& [found_inf, grad_norm, grad_factor] = result;
  return {static_cast<float*>(found_inf.data_ptr()), grad_norm.data_ptr(), grad_factor.data_ptr(),
          grad_norm.scalar_type() == ScalarType::Double};
}

// Returns the tensor that decides the device: the first gradient, or the factor if there are no gradients.
inline const Tensor& leader_of(const TensorList& grads, const std::optional<Tensor>& factor) {
  STD_TORCH_CHECK(!grads.empty() || factor.has_value(), "grads must hold at least one tensor");
  return grads.empty() ? *factor : grads[0];
}

// Gradients of one device as flat arrays, by dtype.
using FlatGrads = std::map<ScalarType, std::vector<FlatTensor>>;

inline FlatGrads flatten_grads(const TensorList& grads) {
  FlatGrads flat;
  if (grads.empty()) return flat;
  const int32_t device = grads[0].get_device_index(), type = device_type(grads[0]);
  uint64_t chunks = 0;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    STD_TORCH_CHECK(grads[i].get_device_index() == device && device_type(grads[i]) == type, "grads[", i,
                    "] must be on the device of grads[0]");
    const ScalarType dtype = check_dtype(grads[i], "grads");
    STD_TORCH_CHECK(is_dense(grads[i]), "grads[", i,
                    "] must be dense (contiguous in some order of its dimensions)");
    check_memory(grads[i], "grads", i);
    FlatTensor tensor{};
    tensor.address[0] = grads[i].data_ptr();
    tensor.numel = grads[i].numel();
    chunks += chunks_of(tensor.numel);
    flat[dtype].push_back(tensor);
  }
  STD_TORCH_CHECK(chunks <= UINT32_MAX, "grads must hold at most ", uint64_t{UINT32_MAX} * kChunk,
                  " elements. Call the operator on parts of the list");
  return flat;
}

// Checks the operators' arguments before anything is changed. `flat` must outlive the check.
inline Check prepare_check(const FlatGrads& flat, const Tensor& leader,
                           const std::optional<Tensor>& inv_scale, std::optional<double> max_norm,
                           double norm_type) {
  STD_TORCH_CHECK(!max_norm.has_value() || *max_norm >= 0, "max_norm must be >= 0, got ",
                  max_norm.value_or(0));
  STD_TORCH_CHECK(norm_type == 1 || norm_type == 2 || norm_type == INFINITY,
                  "norm_type must be 1, 2 or inf, got ", norm_type);
  Check check;
  for (const auto& [dtype, tensors] : flat) check.lists.push_back({&tensors, dtype});
  check.unscaling.factor = device_scalar(inv_scale, "inv_scale", leader, 1);
  check.max_norm = max_norm.value_or(-1);
  check.norm = norm_type == 1 ? Norm::kOne : norm_type == 2 ? Norm::kTwo : Norm::kInf;
  return check;
}

inline Check prepare_rewrite(const FlatGrads& flat, const TensorList& grads,
                             const std::optional<Tensor>& inv_scale) {
  check_apart({{grads, "grads"}});
  Check check = prepare_check(flat, leader_of(grads, inv_scale), inv_scale, std::nullopt, 2);
  check.rewrite = true;
  return check;
}

}  // namespace flatout
