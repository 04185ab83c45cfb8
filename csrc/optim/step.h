// step.h: the tensors of an optimizer step. A bucket checks the tensors once, before anything is changed, and
// then keeps plain data.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core/tensors.h"
#include "optim/rules.h"
#include "optim/storage.h"
#include "scaling/check.h"

namespace flatout {

// The numbers of a step, as arguments of the operator step_bucket_.
struct StepNumbers {
  std::vector<double> options, lrs;
  std::vector<std::optional<Tensor>> lr_tensors;
  std::vector<double> weight_decays;
  bool maximize;
  double ema_decay;
  std::optional<int64_t> seed;
  std::optional<Tensor> grad_factor, found_inf;
  bool unscale_grads;
};

// Parameters of one device and dtype, with states, masters and averages. Their param groups differ in
// GroupNumbers only. A bucket keeps the memory of these tensors alive. Before each step, the bucket checks
// that the caller's tensors still use this memory. Not thread-safe.
class Bucket {
 public:
  Bucket(const std::string& rule, const TensorList& weights, const TensorList& states,
         const TensorList& absmaxes, const TensorList& steps, const TensorList& averages,
         const TensorList& lows, const std::vector<int64_t>& ids, const std::vector<int64_t>& groups);
  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;
  virtual ~Bucket() = default;

  enum class Fit : uint8_t { kReady = 0, kMoved = 1, kCopied = 2, kNotNative = 3 };
  // Keeps the gradients alive until the step. An empty `which` means all weights. If both lists are empty,
  // releases the gradients that are set. Copies gradients whose strides differ from those of their weights.
  Fit set_grads(TensorList grads, const std::vector<int64_t>& which);
  // Updates the weights whose gradients were set, and releases the gradients.
  void step(const StepNumbers& numbers);

  // Runs one check over gradients on the bucket's device.
  virtual CheckResult check(const Check& check) const = 0;

  // Addresses at which a gradient begins and ends.
  using Extent = std::pair<uintptr_t, uintptr_t>;
  void add_grad_extents(std::vector<Extent>& extents) const;
  // True if no two extents overlap. The last extents with this result are cached.
  bool are_apart(std::vector<Extent> extents);

  const Tensor& leader() const { return streams_[0].kept[0]; }
  // The tensors whose gradients are set.
  std::span<const FlatTensor> held() const {
    return grads_.empty() ? std::span<const FlatTensor>() : chosen();
  }
  // Indices of the tensors whose gradients were set last. Empty means all tensors.
  const std::vector<int64_t>& which() const { return which_; }
  ScalarType grad_dtype() const { return grad_dtype_; }

 protected:
  // `dtype` is the narrowest type among the streams.
  virtual void run(RuleName rule, int states, ScalarType dtype, const Storage& storage,
                   const StepConfig& config, const std::vector<double>& options,
                   const std::vector<FlatTensor>& tensors) = 0;

 private:
  // One tensor per weight: the weights, a state, the averages, the 16-bit companions or a state's absmaxes.
  struct Stream {
    TensorList tensors;  // the caller's, whose memory may change
    int slot;            // in FlatTensor::address
    TensorList kept;     // aliases of the memory that steps work on
  };
  void add_stream(TensorList tensors, const char* name, int slot);
  bool has_moved(std::size_t tensor) const;
  Fit fit(const Tensor& grad, ScalarType dtype, std::size_t tensor) const;
  const std::vector<FlatTensor>& chosen() const { return which_.empty() ? flat_ : some_; }
  // The 16-bit type among the streams, else the compute type.
  ScalarType narrowest_stream() const;
  Storage storage() const;

  RuleName rule_;
  int states_;
  bool codes_ = false;  // states are of 8 bits
  Low low_ = Low::kNone;
  std::vector<Stream> streams_;
  TensorList steps_, kept_steps_;
  std::size_t groups_ = 1;        // param groups
  std::vector<FlatTensor> flat_;  // all tensors
  std::vector<char> contiguous_;  // of the weights
  TensorList grads_;              // the gradients that are set
  std::vector<int64_t> which_;    // indices of their weights; empty: all
  std::vector<FlatTensor> some_;  // tensors at these indices
  std::vector<Extent> apart_;
  ScalarType compute_;            // float64 for float64 weights, else float32
  ScalarType narrow_;             // the 16-bit type among the streams, else compute_
  int32_t device_type_, device_;  // device_: its index
  ScalarType grad_dtype_;
};

// Operators cannot take C++ objects, so keep_bucket gives each bucket a number.
int64_t keep_bucket(std::shared_ptr<Bucket> bucket);
std::shared_ptr<Bucket> find_bucket(int64_t number);

// The operator make_bucket, for the device of the bucket class B.
template <class B>
int64_t make_bucket(const std::string& rule, const TensorList& weights, const TensorList& states,
                    const TensorList& absmaxes, const TensorList& steps, const TensorList& averages,
                    const TensorList& lows, const std::vector<int64_t>& ids,
                    const std::vector<int64_t>& groups) {
  return keep_bucket(
      std::make_shared<B>(rule, weights, states, absmaxes, steps, averages, lows, ids, groups));
}

}  // namespace flatout
