// check_buckets.cpp: checks of the gradients that are set in buckets.
#include <torch/csrc/stable/library.h>

#include "optim/step.h"

namespace flatout {
namespace {

// Gradients set in buckets of one device.
class BucketGrads {
 public:
  explicit BucketGrads(const std::vector<int64_t>& numbers) {
    STD_TORCH_CHECK(!numbers.empty(), "buckets must hold at least one number");
    for (const int64_t number : numbers) {
      const std::shared_ptr<Bucket> bucket = find_bucket(number);
      if (first_ == nullptr) first_ = bucket;
      STD_TORCH_CHECK(same_device(bucket->leader(), leader()), "buckets must be on one device");
      if (bucket->held().empty()) continue;
      std::vector<FlatTensor>& grads = grads_[bucket->grad_dtype()];
      grads.reserve(grads.size() + bucket->held().size());
      for (const FlatTensor& tensor : bucket->held()) {
        FlatTensor& gradient = grads.emplace_back();
        gradient.address[0] = tensor.address[1];
        gradient.numel = tensor.numel;
      }
    }
  }

  const Tensor& leader() const { return first_->leader(); }
  Check prepare(const std::optional<Tensor>& inv_scale, std::optional<double> max_norm) const {
    return prepare_check(grads_, leader(), inv_scale, max_norm, 2);
  }
  CheckResult run(const Check& check) const { return first_->check(check); }

 private:
  std::shared_ptr<Bucket> first_;
  FlatGrads grads_;
};

CheckResult check_buckets(const std::vector<int64_t>& numbers, const std::optional<Tensor>& inv_scale,
                          std::optional<double> max_norm, double factor) {
  const BucketGrads grads(numbers);
  Check check = grads.prepare(inv_scale, max_norm);
  // Rounded to float32, like an inv_scale that is a float32 tensor.
  if (!inv_scale.has_value()) check.unscaling.factor.value = static_cast<float>(factor);
  return grads.run(check);
}

template <class T>
T* address_of_one(const Tensor& tensor, const char* name, const Tensor& leader) {
  constexpr bool kIsFloat = std::is_same_v<T, float>;
  check_number(tensor, tensor.scalar_type() == (kIsFloat ? ScalarType::Float : ScalarType::Int),
               kIsFloat ? "float32" : "int32", name, leader);
  return static_cast<T*>(tensor.data_ptr());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> check_scaled_buckets(
    const std::vector<int64_t>& numbers, const Tensor& scale, const Tensor& growth_tracker,
    const Tensor& next_scale, const Tensor& next_growth_tracker, double growth_factor, double backoff_factor,
    int64_t growth_interval, std::optional<double> max_norm) {
  const BucketGrads grads(numbers);
  const Tensor& leader = grads.leader();
  Check check = grads.prepare(std::nullopt, max_norm);
  const Tensor skipped = new_tensor(leader, ScalarType::Bool);
  check.unscaling.loss_scale = {
      address_of_one<float>(scale, "scale", leader),
      address_of_one<int32_t>(growth_tracker, "growth_tracker", leader),
      address_of_one<float>(next_scale, "next_scale", leader),
      address_of_one<int32_t>(next_growth_tracker, "next_growth_tracker", leader),
      static_cast<bool*>(skipped.data_ptr()),
      growth_factor,
      backoff_factor,
      growth_interval,
  };
  const TensorList scales{scale, next_scale}, trackers{growth_tracker, next_growth_tracker};
  check_apart({{scales, "scales"}, {trackers, "growth_trackers"}});
  const auto [found_inf, grad_norm, grad_factor] = grads.run(check);
  return {found_inf, grad_norm, grad_factor, skipped};
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CompositeExplicitAutograd, m) {
  m.impl("check_buckets", TORCH_BOX(&flatout::check_buckets));
  m.impl("check_scaled_buckets", TORCH_BOX(&flatout::check_scaled_buckets));
}
