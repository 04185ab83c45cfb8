// step_launch.h: the CUDA launcher of optimizer steps, callable from code that knows torch and code that does
// not.
#pragma once

#include <vector>

#include "core/chunks.h"
#include "core/cuda_launch.h"
#include "optim/rules.h"
#include "optim/storage.h"

namespace flatout {

// A step over tensors whose narrowest type is T. `ticket` is a zero on the device, and is one again after
// each launch. False when the rule cannot have that many states; then nothing has been launched.
template <class T>
bool launch_step(RuleName rule, int states, const Storage& storage, const StepConfig& common,
                 const std::vector<double>& options, const std::vector<FlatTensor>& tensors, uint32_t* ticket,
                 cudaStream_t stream);

}  // namespace flatout
