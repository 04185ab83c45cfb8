// step_bf16.cu: optimizer steps whose narrowest tensors are bf16.
#include "optim/step_kernel.cuh"

namespace flatout {
template bool launch_step<bf16>(RuleName, int, const Storage&, const StepConfig&, const std::vector<double>&,
                                const std::vector<FlatTensor>&, const StepTable&, cudaStream_t);
}  // namespace flatout
