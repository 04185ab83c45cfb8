// buckets.h: buckets by number, for operators that cannot hold an object.
#pragma once

#include <memory>

#include "optim/step.h"

namespace flatout {

int64_t keep_bucket(std::shared_ptr<Bucket> bucket);
// A step of a bucket that is not kept.
void step_once(Bucket& bucket, const TensorList& grads, const StepNumbers& numbers);

}  // namespace flatout
