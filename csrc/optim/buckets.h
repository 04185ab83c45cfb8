// buckets.h: buckets by number, because arguments of operators cannot be C++ objects.
#pragma once

#include <memory>

#include "optim/step.h"

namespace flatout {

int64_t keep_bucket(std::shared_ptr<Bucket> bucket);
std::shared_ptr<Bucket> find_bucket(int64_t number);

// The operator make_bucket, for the device of the bucket class B.
template <class B>
int64_t make_bucket(const std::string& rule, const TensorList& weights, const TensorList& states,
                    const TensorList& absmaxes, const TensorList& steps, const TensorList& averages,
                    const TensorList& lows, const std::vector<int64_t>& ids) {
  return keep_bucket(std::make_shared<B>(rule, weights, states, absmaxes, steps, averages, lows, ids));
}

}  // namespace flatout
