// play_cpu.cpp: test-only. The host plays the blocks and threads of the CUDA kernels that normalise images
// over the same thread functions, so that their index arithmetic is proved where there is no GPU.
#include <torch/csrc/stable/library.h>

#include "images/images.h"
#include "images/normalize_thread.h"

namespace flatout {
namespace {

// What group_kernel does; false where the batch is not for it.
template <class T, int C, Order In, Order Out>
bool play_groups(const ImageBatch& batch, const std::vector<Channel>& channels) {
  using Thread = GroupThread<T, C, In, Out>;
  if (batch.in_order != In || batch.out_order != Out || !Thread::fits(batch)) return false;
  const Thread thread(batch);
  Channel constants[C];
  std::copy(channels.begin(), channels.end(), constants);
  for (uint32_t first = 0; first < thread.groups(); first += kLanesOfWarp) {
    Pack<T> stage[kLanesOfWarp * C] = {};
    for (uint32_t lane = 0; lane < kLanesOfWarp; ++lane) thread.compute(constants, first + lane, lane, stage);
    for (uint32_t lane = 0; lane < kLanesOfWarp; ++lane) thread.store_staged(first, lane, stage);
  }
  return true;
}

template <class T, int C>
bool play_few_channels(const ImageBatch& batch, const std::vector<Channel>& channels) {
  constexpr Order kPlanar = Order::kPlanar, kInterleaved = Order::kInterleaved;
  return play_groups<T, C, kPlanar, kInterleaved>(batch, channels) ||
         play_groups<T, C, kInterleaved, kInterleaved>(batch, channels) ||
         play_groups<T, C, kPlanar, kPlanar>(batch, channels) ||
         play_groups<T, C, kInterleaved, kPlanar>(batch, channels);
}

// normalize_images as normalize.cu runs it; `general` plays the kernel for any batch where another one would
// do. Also returns whether the kernel for few channels was played.
std::tuple<Tensor, bool> play_normalize(const Tensor& images, const std::vector<double>& mean,
                                        const std::vector<double>& std, ScalarType dtype, bool channels_last,
                                        bool general) {
  const Normalization job = prepare_normalization(images, mean, std, dtype, channels_last);
  const ImageBatch& batch = job.batch;
  bool few = false;
  if (batch.elements() == 0) return {job.out, few};
  with_image_dtype(dtype, [&]<class T>(T*) {
    few = !general &&
          (play_groups<T, 1, Order::kInterleaved, Order::kInterleaved>(batch, job.channels) ||
           play_few_channels<T, 3>(batch, job.channels) || play_few_channels<T, 4>(batch, job.channels));
    if (few) return;
    // One more thread than there are packs, as in a last block.
    for (int64_t pack = 0; pack * Pack<T>::kWidth <= batch.elements(); ++pack)
      normalize_pack<T>(batch, job.channels.data(), pack);
  });
  return {job.out, few};
}

// quotient of each number by the divisor.
Tensor play_divide(const Tensor& numbers, int64_t divisor) {
  const Divisor by(static_cast<uint32_t>(divisor));
  Tensor quotients = torch::stable::empty_like(numbers);
  const auto* from = static_cast<const int64_t*>(numbers.const_data_ptr());
  auto* to = static_cast<int64_t*>(quotients.data_ptr());
  for (int64_t i = 0; i < numbers.numel(); ++i) to[i] = by.quotient(static_cast<uint32_t>(from[i]));
  return quotients;
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_FRAGMENT(flatout_testing, m) {
  m.def(
      "normalize_images(Tensor images, float[] mean, float[] std, ScalarType dtype, bool channels_last, "
      "bool general) -> (Tensor, bool)");
  m.def("divide(Tensor numbers, int divisor) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(flatout_testing, CPU, m) {
  m.impl("normalize_images", TORCH_BOX(&flatout::play_normalize));
  m.impl("divide", TORCH_BOX(&flatout::play_divide));
}
