// step_f16.cu: optimizer steps whose narrowest tensors are f16.
#include "optim/step_kernel.cuh"

namespace flatout {
template bool launch_step<f16>(RuleName, int, const Storage&, const StepConfig&, const std::vector<double>&,
                               const std::vector<FlatTensor>&, const StepTable&, cudaStream_t);
}  // namespace flatout
