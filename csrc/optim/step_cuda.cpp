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

int64_t make_bucket_cuda(const std::string& rule, const TensorList& weights, const TensorList& states,
                         const TensorList& steps, const TensorList& averages, const TensorList& lows,
                         const std::vector<int64_t>& ids) {
  return keep_bucket(std::make_shared<CudaBucket>(rule, weights, states, steps, averages, lows, ids));
}

void step_cuda_(const std::string& rule, const TensorList& weights, const TensorList& grads,
                const TensorList& states, const TensorList& steps, const TensorList& averages,
                const TensorList& lows, const std::vector<int64_t>& ids, const std::vector<double>& options,
                double lr, const std::optional<Tensor>& lr_tensor, double weight_decay, bool maximize,
                double ema_decay, std::optional<int64_t> seed, const std::optional<Tensor>& grad_factor,
                const std::optional<Tensor>& found_inf) {
  CudaBucket bucket(rule, weights, states, steps, averages, lows, ids);
  step_once(bucket, grads,
            {options, lr, lr_tensor, weight_decay, maximize, ema_decay, seed, grad_factor, found_inf});
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CUDA, m) {
  m.impl("make_bucket", TORCH_BOX(&flatout::make_bucket_cuda));
  m.impl("step_", TORCH_BOX(&flatout::step_cuda_));
}
