// norms.cu: the norm of each gradient on CUDA, in one launch per dtype. In the block that finishes last, a
// warp adds the partial sums of one gradient at a time, in a fixed order.
#include "scaling/block_sum.cuh"
#include "scaling/check_chunk.h"
#include "scaling/check_launch.h"

namespace flatout {
namespace {

using Table = GradTable<>;
static_assert(sizeof(Table) + sizeof(Norms) + 64 <= kArgumentBytes);

template <class T, Norm kNorm>
__global__ void __launch_bounds__(kThreads)
    norms_kernel(__grid_constant__ Argument<Table> table, __grid_constant__ Argument<Norms> norms) {
  __shared__ WarpSums warps;
  __shared__ bool last;
  if (blockIdx.x < table.chunks()) {
    const auto inverse = static_cast<compute_t<T>>(norms.inv_scale.get());
    keep_warp_sum<kNorm>(warps, check_chunk<kNorm, false, T>(view_chunk<T>(table, blockIdx.x), inverse,
                                                             threadIdx.x, blockDim.x));
    __syncthreads();
    if (threadIdx.x < kLanes) {
      const Partial sum = sum_of<kNorm>(warps);
      if (threadIdx.x == 0) norms.partials[blockIdx.x] = sum;
    }
  }
  if (threadIdx.x == 0) last = finishes_last(address_of(norms.counter), 1, gridDim.x);
  __syncthreads();
  if (!last) return;
  constexpr uint32_t kTogether = 4;  // more would take registers and lower occupancy
  for (uint32_t t = threadIdx.x / kLanes; t < table.tensors; t += blockDim.x / kLanes) {
    const uint32_t first = table.first_chunk[t], chunks = table.first_chunk[t + 1] - first;
    const Partial total = warp_sum<kNorm>(
        add_partials<kNorm, kTogether>(norms.partials + first, chunks, threadIdx.x % kLanes, kLanes));
    if (threadIdx.x % kLanes == 0) norms.template write<kNorm>(t, chunks, total);
  }
}

}  // namespace

template <class T>
void launch_norms(const std::vector<FlatTensor>& tensors, Norm norm, const Norms& norms,
                  cudaStream_t stream) {
  with_norm(norm, [&]<Norm kNorm>(std::integral_constant<Norm, kNorm>) {
    uint32_t first = 0;
    for_each_table<Table>(tensors, [&](const Table& table) {
      const uint32_t chunks = table.chunks();
      if (chunks != 0 || norms.writes_empty)
        launch("norms_kernel", norms_kernel<T, kNorm>, chunks == 0 ? 1 : chunks, kThreads, stream, table,
               norms.from(first));
      first += table.tensors;
    });
  });
}

template void launch_norms<float>(const std::vector<FlatTensor>&, Norm, const Norms&, cudaStream_t);
template void launch_norms<double>(const std::vector<FlatTensor>&, Norm, const Norms&, cudaStream_t);
template void launch_norms<f16>(const std::vector<FlatTensor>&, Norm, const Norms&, cudaStream_t);
template void launch_norms<bf16>(const std::vector<FlatTensor>&, Norm, const Norms&, cudaStream_t);

}  // namespace flatout
