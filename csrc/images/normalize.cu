// normalize.cu: conversion of uint8 images to normalized floats on CUDA, with one read and one write.
#include "images/normalize_launch.h"

namespace flatout {
namespace {

// Fewer threads than in other kernels, so that a batch of small images has enough blocks.
constexpr int kBlockThreads = 256;

template <int Count>
struct Channels {
  Channel of[Count];
};
static_assert(sizeof(Channels<kMaxChannels>) + sizeof(ImageBatch) <= 4096);

template <class T, int C, Order In, Order Out>
__global__ void __launch_bounds__(kBlockThreads)
    group_kernel(__grid_constant__ Argument<GroupThread<T, C, In, Out>> thread,
                 __grid_constant__ Argument<Channels<C>> channels) {
  const uint32_t lane = threadIdx.x % kLanes;
  const uint32_t group = blockIdx.x * kBlockThreads + threadIdx.x;
  if constexpr (GroupThread<T, C, In, Out>::kStaged) {
    __shared__ Pack<T> stages[kBlockThreads * C];
    Pack<T>* stage = stages + (threadIdx.x - lane) * C;
    thread.compute(channels.of, group, lane, stage);
    __syncwarp();
    thread.store_staged(group - lane, lane, stage);
  } else {
    thread.compute(channels.of, group, lane, nullptr);
  }
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    pack_kernel(__grid_constant__ Argument<ImageBatch> batch,
                __grid_constant__ Argument<Channels<kMaxChannels>> channels) {
  // Lanes read different channels. Reads of kernel arguments at different addresses would be serialized.
  __shared__ Channel shared[kMaxChannels];
  for (int c = threadIdx.x; c < batch.channels; c += kBlockThreads) shared[c] = channels.of[c];
  __syncthreads();
  normalize_pack<T>(batch, shared, int64_t{blockIdx.x} * kBlockThreads + threadIdx.x);
}

template <int Count>
Channels<Count> as_argument(const Channel* channels, int64_t count) {
  Channels<Count> argument{};
  for (int64_t c = 0; c < count; ++c) argument.of[c] = channels[c];
  return argument;
}

uint32_t blocks_of(int64_t threads) {
  return static_cast<uint32_t>((threads + kBlockThreads - 1) / kBlockThreads);
}

// Returns false if the batch does not fit this kernel.
template <class T, int C, Order In, Order Out>
bool launch_groups(const ImageBatch& batch, const Channel* channels, cudaStream_t stream) {
  using Thread = GroupThread<T, C, In, Out>;
  if (batch.in_order != In || batch.out_order != Out || !Thread::fits(batch)) return false;
  const Thread thread(batch);
  launch("group_kernel", group_kernel<T, C, In, Out>, blocks_of(thread.groups()), kBlockThreads, stream,
         thread, as_argument<C>(channels, C));
  return true;
}

template <class T, int C>
bool launch_few_channels(const ImageBatch& batch, const Channel* channels, cudaStream_t stream) {
  constexpr Order kPlanar = Order::kPlanar, kInterleaved = Order::kInterleaved;
  return launch_groups<T, C, kPlanar, kInterleaved>(batch, channels, stream) ||
         launch_groups<T, C, kInterleaved, kInterleaved>(batch, channels, stream) ||
         launch_groups<T, C, kPlanar, kPlanar>(batch, channels, stream) ||
         launch_groups<T, C, kInterleaved, kPlanar>(batch, channels, stream);
}

}  // namespace

template <class T>
void launch_normalize(const ImageBatch& batch, const Channel* channels, cudaStream_t stream) {
  if (batch.elements() == 0) return;
  if (!launch_groups<T, 1, Order::kInterleaved, Order::kInterleaved>(batch, channels, stream) &&
      !launch_few_channels<T, 3>(batch, channels, stream) &&
      !launch_few_channels<T, 4>(batch, channels, stream)) {
    const int64_t packs = (batch.elements() + Pack<T>::kWidth - 1) / Pack<T>::kWidth;
    launch("pack_kernel", pack_kernel<T>, blocks_of(packs), kBlockThreads, stream, batch,
           as_argument<kMaxChannels>(channels, batch.channels));
  }
}

template void launch_normalize<float>(const ImageBatch&, const Channel*, cudaStream_t);
template void launch_normalize<f16>(const ImageBatch&, const Channel*, cudaStream_t);
template void launch_normalize<bf16>(const ImageBatch&, const Channel*, cudaStream_t);

}  // namespace flatout
