// images.h: argument checks and output of image normalization, for the CPU and for CUDA.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "core/tensors.h"
#include "images/normalize.h"

namespace flatout {

// The operator's checked arguments. `images` and `out` keep the memory that `batch` points to.
struct Normalization {
  Tensor images, out;
  std::vector<Channel> channels;
  ImageBatch batch;
};

inline bool is_interleaved(const Tensor& images) {
  int64_t expected = 1;
  for (const int64_t d : {1, 3, 2, 0}) {
    if (images.size(d) != 1 && images.stride(d) != expected) return false;
    expected *= images.size(d);
  }
  return true;
}

inline std::vector<Channel> check_channels(const std::vector<double>& mean, const std::vector<double>& std,
                                           int64_t channels) {
  STD_TORCH_CHECK(static_cast<int64_t>(mean.size()) == channels && mean.size() == std.size(),
                  "mean and std must hold a number for each of the ", channels, " channels of images, got ",
                  mean.size(), " and ", std.size());
  const auto in_range = [](double value) { return value >= 1e-18 && value <= 1e18; };
  std::vector<Channel> constants;
  for (std::size_t c = 0; c < mean.size(); ++c) {
    STD_TORCH_CHECK(mean[c] == 0 || in_range(std::abs(mean[c])), "mean[", c,
                    "] must be 0 or of a magnitude from 1e-18 to 1e18, got ", mean[c]);
    STD_TORCH_CHECK(in_range(std[c]), "std[", c, "] must be a number from 1e-18 to 1e18, got ", std[c]);
    constants.push_back(Channel::of(mean[c], std[c]));
  }
  return constants;
}

inline Normalization prepare_normalization(const Tensor& images, const std::vector<double>& mean,
                                           const std::vector<double>& std, ScalarType dtype,
                                           bool channels_last) {
  STD_TORCH_CHECK(images.dim() == 4 && images.scalar_type() == ScalarType::Byte,
                  "images must be uint8 of 4 dimensions [N, C, H, W], got ", images.dim(), " of ",
                  torch::headeronly::toString(images.scalar_type()));
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                  "dtype must be float32, float16 or bfloat16, got ", torch::headeronly::toString(dtype));
  using torch::headeronly::MemoryFormat;
  const MemoryFormat format = channels_last ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous;
  Normalization job{
      images,
      torch::stable::empty(images.sizes(), dtype, std::nullopt, images.device(), std::nullopt, format),
      check_channels(mean, std, images.size(1)), ImageBatch{}};
  const bool interleaved = is_interleaved(images), planar = images.is_contiguous();
  const Order out_order = channels_last ? Order::kInterleaved : Order::kPlanar;
  Order in_order = out_order;
  if (!interleaved && !planar) {
    job.images = torch::stable::contiguous(images, format);
  } else if (!(channels_last ? interleaved : planar)) {
    in_order = interleaved ? Order::kInterleaved : Order::kPlanar;
  }
  job.batch = {static_cast<const uint8_t*>(job.images.const_data_ptr()),
               job.out.data_ptr(),
               images.size(0),
               images.size(1),
               images.size(2) * images.size(3),
               in_order,
               out_order};
  if (job.batch.channels == 1 || job.batch.pixels == 1)
    job.batch.in_order = job.batch.out_order = Order::kInterleaved;
  return job;
}

// Calls body with a null pointer of the C++ type of the output's dtype.
template <class Body>
void with_image_dtype(ScalarType dtype, const Body& body) {
  switch (dtype) {
    case ScalarType::Float:
      return body(static_cast<float*>(nullptr));
    case ScalarType::Half:
      return body(static_cast<f16*>(nullptr));
    default:
      return body(static_cast<bf16*>(nullptr));
  }
}

}  // namespace flatout
