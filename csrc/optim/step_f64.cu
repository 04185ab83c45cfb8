// step_f64.cu: optimizer steps whose narrowest tensors are f64.
#include "optim/step_kernel.cuh"

namespace flatout {
template bool launch_step<double>(RuleName, int, const Storage&, const StepConfig&,
                                  const std::vector<double>&, const std::vector<FlatTensor>&,
                                  const StepTable&, cudaStream_t);
}  // namespace flatout
