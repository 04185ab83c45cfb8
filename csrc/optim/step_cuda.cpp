// step_cuda.cpp: optimizer steps under torch's CUDA key.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "core/cuda_glue.h"
#include "core/nvtx.h"
#include "optim/step.h"
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
    const Tensor table = table_of(tensors, scope.stream());
    with_dtype(dtype, [&]<class T>(T*) {
      const bool known = launch_step<T>(rule, states, storage, common, options, tensors,
                                        table_at(table.data_ptr(), tensors.size()), scope.stream());
      STD_TORCH_CHECK(known, "the rule cannot have ", states, " states per weight with these options");
    });
  }

  // Keeps the table while the same tensors are updated on the same stream. torch's allocator tracks the use
  // of the memory on this stream only. A captured step writes and frees its own table within the CUDA graph.
  Tensor table_of(const std::vector<FlatTensor>& tensors, cudaStream_t stream) {
    if (is_capturing(stream)) return new_table(tensors, stream);
    if (!table_.has_value() || stream_ != stream || which_ != which()) {
      table_.reset();  // if a call below fails, no stale table is left
      which_ = which();
      stream_ = stream;
      table_ = new_table(tensors, stream);
    }
    return *table_;
  }

  Tensor new_table(const std::vector<FlatTensor>& tensors, cudaStream_t stream) const {
    const std::vector<char> image = table_image(tensors);
    const int64_t size[] = {static_cast<int64_t>(image.size())};
    Tensor table = torch::stable::new_empty(leader(), {size, 1}, ScalarType::Byte);
    launch_write(table.data_ptr(), image.data(), image.size(), stream);
    return table;
  }

  std::optional<Tensor> table_;
  cudaStream_t stream_ = nullptr;
  std::vector<int64_t> which_;
};

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CUDA, m) {
  m.impl("make_bucket", TORCH_BOX(&flatout::make_bucket<flatout::CudaBucket>));
}
