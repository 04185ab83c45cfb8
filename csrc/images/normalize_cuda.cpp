// normalize_cuda.cpp: image normalization under torch's CUDA key.
#include <torch/csrc/stable/library.h>

#include "core/cuda_glue.h"
#include "core/nvtx.h"
#include "images/images.h"
#include "images/normalize_launch.h"

namespace flatout {
namespace {

Tensor normalize_images_cuda(const Tensor& images, const std::vector<double>& mean,
                             const std::vector<double>& std, ScalarType dtype, bool channels_last) {
  const CudaScope scope(images);
  const nvtx::Range range("flatout::normalize_images");
  const Normalization job = prepare_normalization(images, mean, std, dtype, channels_last);
  STD_TORCH_CHECK(job.batch.channels <= kMaxChannels, "images on CUDA must have ", kMaxChannels,
                  " channels at most, got ", job.batch.channels);
  with_image_dtype(dtype,
                   [&]<class T>(T*) { launch_normalize<T>(job.batch, job.channels.data(), scope.stream()); });
  return job.out;
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CUDA, m) {
  m.impl("normalize_images", TORCH_BOX(&flatout::normalize_images_cuda));
}
