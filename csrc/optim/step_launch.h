// step_launch.h: the CUDA launchers of optimizer steps, and of conversions of whole states into 8 bits and
// back. Includes no torch header.
#pragma once

#include <vector>

#include "core/chunks.h"
#include "core/cuda_launch.h"
#include "optim/rules.h"
#include "optim/step_table.h"
#include "optim/storage.h"

namespace flatout {

// Queues a step over tensors whose narrowest type is T. `tensors` has their gradients, and `table` their
// other addresses on the device. Returns false and launches nothing if the rule cannot have that many states.
template <class T>
bool launch_step(RuleName rule, int states, const Storage& storage, const StepConfig& common,
                 const std::vector<double>& options, const std::vector<FlatTensor>& tensors,
                 const StepTable& table, cudaStream_t stream);

// Copies `bytes`, a multiple of 4, to the device in stream order. The bytes are kernel arguments, so the host
// may free them after the call, and a CUDA graph keeps a copy.
void launch_write(void* to, const void* from, std::size_t bytes, cudaStream_t stream);

// Convert `count` numbers into codes of 8 bits, and codes into numbers. `absmax` holds the largest absolute
// value of each block of kDynamicBlock numbers.
void launch_encode(const float* values, uint8_t* codes, float* absmax, int64_t count, bool has_sign,
                   cudaStream_t stream);
void launch_decode(float* values, const uint8_t* codes, const float* absmax, int64_t count, bool has_sign,
                   cudaStream_t stream);

}  // namespace flatout
