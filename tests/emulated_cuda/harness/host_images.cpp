// host_images.cpp: normalizes images on the host, with the threads of normalize.cu.
#include <algorithm>

#include "host.h"

namespace harness {

using namespace flatout;

namespace {

template <class T, int C, Order In, Order Out>
bool run_groups(const ImageBatch& batch, const Channel* channels) {
  using Thread = GroupThread<T, C, In, Out>;
  if (batch.in_order != In || batch.out_order != Out || !Thread::fits(batch)) return false;
  const Thread thread(batch);
  Channel constants[C];
  std::copy(channels, channels + C, constants);
  for (uint32_t first = 0; first < thread.groups(); first += kLanes) {
    Pack<T> stage[kLanes * C] = {};
    for (uint32_t lane = 0; lane < kLanes; ++lane) thread.compute(constants, first + lane, lane, stage);
    for (uint32_t lane = 0; lane < kLanes; ++lane) thread.store_staged(first, lane, stage);
  }
  return true;
}

template <class T, int C>
bool run_few_channels(const ImageBatch& batch, const Channel* channels) {
  constexpr Order kPlanar = Order::kPlanar, kInterleaved = Order::kInterleaved;
  return run_groups<T, C, kPlanar, kInterleaved>(batch, channels) ||
         run_groups<T, C, kInterleaved, kInterleaved>(batch, channels) ||
         run_groups<T, C, kPlanar, kPlanar>(batch, channels) ||
         run_groups<T, C, kInterleaved, kPlanar>(batch, channels);
}

}  // namespace

template <class T>
void normalize_on_host(const ImageBatch& batch, const Channel* channels) {
  if (run_groups<T, 1, Order::kInterleaved, Order::kInterleaved>(batch, channels) ||
      run_few_channels<T, 3>(batch, channels) || run_few_channels<T, 4>(batch, channels))
    return;
  for (int64_t pack = 0; pack * Pack<T>::kWidth < batch.elements(); ++pack)
    normalize_pack<T>(batch, channels, pack);
}

template void normalize_on_host<float>(const ImageBatch&, const Channel*);
template void normalize_on_host<f16>(const ImageBatch&, const Channel*);
template void normalize_on_host<bf16>(const ImageBatch&, const Channel*);

}  // namespace harness
