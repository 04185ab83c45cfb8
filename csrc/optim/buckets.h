// buckets.h: buckets by number, for operators that cannot hold an object; and the operators themselves.
#pragma once

#include <memory>

#include "optim/step.h"

namespace flatout {

int64_t keep_bucket(std::shared_ptr<Bucket> bucket);
std::shared_ptr<Bucket> find_bucket(int64_t number);
// A step of a bucket that is not kept.
void step_once(Bucket& bucket, const TensorList& grads, const StepNumbers& numbers);

// make_bucket and step_ for the device that a kind of bucket runs on.
template <class B>
int64_t make_bucket(const std::string& rule, const TensorList& weights, const TensorList& states,
                    const TensorList& absmaxes, const TensorList& steps, const TensorList& averages,
                    const TensorList& lows, const std::vector<int64_t>& ids) {
  return keep_bucket(std::make_shared<B>(rule, weights, states, absmaxes, steps, averages, lows, ids));
}

template <class B>
void step_(const std::string& rule, const TensorList& weights, const TensorList& grads,
           const TensorList& states, const TensorList& absmaxes, const TensorList& steps,
           const TensorList& averages, const TensorList& lows, const std::vector<int64_t>& ids,
           const std::vector<double>& options, double lr, const std::optional<Tensor>& lr_tensor,
           double weight_decay, bool maximize, double ema_decay, std::optional<int64_t> seed,
           const std::optional<Tensor>& grad_factor, const std::optional<Tensor>& found_inf,
           bool unscale_grads) {
  B bucket(rule, weights, states, absmaxes, steps, averages, lows, ids);
  step_once(bucket, grads,
            {options, lr, lr_tensor, weight_decay, maximize, ema_decay, seed, grad_factor, found_inf,
             unscale_grads});
}

}  // namespace flatout
