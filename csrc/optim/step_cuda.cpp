// step_cuda.cpp: optimizer steps under torch's CUDA key.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "core/cuda_glue.h"
#include "core/nvtx.h"
#include "optim/buckets.h"
#include "optim/step_launch.h"

namespace flatout {
namespace {

class CudaBucket final : public Bucket {
 public:
  using Bucket::Bucket;

  CheckResult check(const Check& check) const override { return check_on_cuda(check, leader()); }

 private:
  void run(RuleName rule, int states, ScalarType dtype, const Storage& storage, const StepConfig& common,
           const std::vector<double>& options, const std::vector<FlatTensor>& tensors) override {
    const nvtx::Range range("flatout::step");
    const CudaScope scope(leader());
    // Counts the blocks that are done. Of this step alone, like the scratch memory of a check.
    const int64_t size[] = {1};
    const Tensor ticket = torch::stable::new_empty(leader(), {size, 1}, ScalarType::Int);
    check_cuda(cudaMemsetAsync(ticket.data_ptr(), 0, sizeof(uint32_t), scope.stream()), "cudaMemsetAsync");
    with_dtype(dtype, [&]<class T>(T*) {
      const bool known = launch_step<T>(rule, states, storage, common, options, tensors,
                                        static_cast<uint32_t*>(ticket.data_ptr()), scope.stream());
      STD_TORCH_CHECK(known, "the rule cannot have ", states, " states per weight with these options");
    });
  }
};

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CUDA, m) {
  m.impl("make_bucket", TORCH_BOX(&flatout::make_bucket<flatout::CudaBucket>));
  m.impl("step_", TORCH_BOX(&flatout::step_<flatout::CudaBucket>));
}
