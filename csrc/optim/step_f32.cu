// step_f32.cu: optimizer steps whose narrowest tensors are f32.
#include "optim/step_kernel.cuh"

namespace flatout {
template bool launch_step<float>(RuleName, int, const Storage&, const StepConfig&, const std::vector<double>&,
                                 const std::vector<FlatTensor>&, const StepTable&, cudaStream_t);
}  // namespace flatout
