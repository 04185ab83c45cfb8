// check.cu: unscale + check + norm on CUDA. Every block leaves a partial sum per chunk; the block that
// finishes last adds them in a fixed order, so the norm is the same in every run.
#include "scaling/check_chunk.h"
#include "scaling/check_launch.h"

namespace flatout {
namespace {

using Table = GradTable<>;
static_assert(sizeof(Table) + sizeof(Conclusion) + 64 <= kArgumentBytes);

constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

template <Norm kNorm>
__device__ Partial warp_sum(Partial mine) {
  for (int offset = 16; offset > 0; offset /= 2)
    mine.add<kNorm>(
        {__shfl_down_sync(kWholeWarp, mine.norm, offset), __shfl_down_sync(kWholeWarp, mine.bad, offset)});
  return mine;
}

// The sum over the block, in thread 0. To be called by all threads; blockDim.x is a multiple of 32.
template <Norm kNorm>
__device__ Partial block_sum(Partial mine) {
  __shared__ Partial warps[32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  mine = warp_sum<kNorm>(mine);
  if (lane == 0) warps[warp] = mine;
  __syncthreads();
  if (warp == 0) mine = warp_sum<kNorm>(lane < blockDim.x / 32 ? warps[lane] : Partial{0, 0});
  return mine;
}

template <class T, Norm kNorm, bool Rewrite>
__global__ void __launch_bounds__(kThreads)
    check_kernel(__grid_constant__ Argument<Table> table, __grid_constant__ Argument<Conclusion> conclusion,
                 uint32_t first_partial) {
  const auto inverse = static_cast<compute_t<T>>(conclusion.inv_scale.get());
  const Partial sum = block_sum<kNorm>(
      check_chunk<kNorm, Rewrite, T>(view_chunk<T>(table, blockIdx.x), inverse, threadIdx.x, blockDim.x));
  __shared__ bool last;
  if (threadIdx.x == 0) {
    conclusion.partials[first_partial + blockIdx.x] = sum;
    __threadfence();  // whoever sees the count sees the partials of all who counted before
    last = atomicAdd(conclusion.finished, 1u) + 1 == conclusion.chunks;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  const Partial total = block_sum<kNorm>(conclusion.template add_partials<kNorm>(threadIdx.x, blockDim.x));
  if (threadIdx.x == 0) conclusion.template write<kNorm>(total);
}

// For gradients without elements: nothing is infinite, and all norms are 0.
__global__ void conclude_kernel(__grid_constant__ Argument<Conclusion> conclusion) {
  conclusion.write<Norm::kTwo>({0, 0});
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(__grid_constant__ Argument<Table> table, __grid_constant__ Argument<DeviceScalar> factor) {
  const auto value = static_cast<compute_t<T>>(factor.get());
  if (value == 1) return;
  scale_chunk<T>(view_chunk<T>(table, blockIdx.x), value, threadIdx.x, blockDim.x);
}

template <class T, Norm kNorm, bool Rewrite>
void launch_checks(const std::vector<FlatTensor>& tensors, const Conclusion& conclusion,
                   uint32_t first_partial, cudaStream_t stream) {
  for_each_table<Table>(tensors, [&](const Table& table) {
    const uint32_t blocks = table.chunks();
    if (blocks == 0) return;
    launch("check_kernel", check_kernel<T, kNorm, Rewrite>, blocks, kThreads, stream, table, conclusion,
           first_partial);
    first_partial += blocks;
  });
}

}  // namespace

void begin_check(const Conclusion& conclusion, cudaStream_t stream) {
  if (conclusion.chunks == 0) {
    launch("conclude_kernel", conclude_kernel, 1, 1, stream, conclusion);
  } else {
    check_cuda(cudaMemsetAsync(conclusion.finished, 0, sizeof(*conclusion.finished), stream),
               "cudaMemsetAsync");
  }
}

template <class T>
void launch_check(const std::vector<FlatTensor>& tensors, Norm norm, bool rewrite,
                  const Conclusion& conclusion, uint32_t first_partial, cudaStream_t stream) {
  if (rewrite) return launch_checks<T, Norm::kTwo, true>(tensors, conclusion, first_partial, stream);
  with_norm(norm, [&](auto kind) {
    launch_checks<T, decltype(kind)::value, false>(tensors, conclusion, first_partial, stream);
  });
}

template <class T>
void launch_scale(const std::vector<FlatTensor>& tensors, const DeviceScalar& factor, cudaStream_t stream) {
  for_each_table<Table>(tensors, [&](const Table& table) {
    if (table.chunks() == 0) return;
    launch("scale_kernel", scale_kernel<T>, table.chunks(), kThreads, stream, table, factor);
  });
}

template void launch_check<float>(const std::vector<FlatTensor>&, Norm, bool, const Conclusion&, uint32_t,
                                  cudaStream_t);
template void launch_scale<float>(const std::vector<FlatTensor>&, const DeviceScalar&, cudaStream_t);
template void launch_check<double>(const std::vector<FlatTensor>&, Norm, bool, const Conclusion&, uint32_t,
                                   cudaStream_t);
template void launch_scale<double>(const std::vector<FlatTensor>&, const DeviceScalar&, cudaStream_t);
template void launch_check<f16>(const std::vector<FlatTensor>&, Norm, bool, const Conclusion&, uint32_t,
                                cudaStream_t);
template void launch_scale<f16>(const std::vector<FlatTensor>&, const DeviceScalar&, cudaStream_t);
template void launch_check<bf16>(const std::vector<FlatTensor>&, Norm, bool, const Conclusion&, uint32_t,
                                 cudaStream_t);
template void launch_scale<bf16>(const std::vector<FlatTensor>&, const DeviceScalar&, cudaStream_t);

}  // namespace flatout
