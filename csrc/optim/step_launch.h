// step_launch.h: the CUDA launchers of optimizer steps, callable from code that knows torch and code that
// does not.
#pragma once

#include <vector>

#include "core/chunks.h"
#include "core/cuda_launch.h"
#include "optim/rules.h"

namespace flatout {

void launch_adamw(const AdamConfig& config, const std::vector<FlatTensor>& tensors, Element element,
                  bool amsgrad, cudaStream_t stream);
void launch_sgd(const SgdConfig& config, const std::vector<FlatTensor>& tensors, Element element,
                bool momentum, bool nesterov, cudaStream_t stream);

}  // namespace flatout
