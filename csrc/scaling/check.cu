// check.cu: unscale + check + norm on CUDA. Partial sums per chunk, then one block adds them in a fixed
// order, so the norm is the same in every run.
#include "scaling/check_chunk.h"
#include "scaling/check_launch.h"

namespace flatout {
namespace {

constexpr int kFinalThreads = 1024;
constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

__device__ Partial warp_sum(Partial mine) {
  for (int offset = 16; offset > 0; offset /= 2) {
    mine.sum += __shfl_down_sync(kWholeWarp, mine.sum, offset);
    mine.bad += __shfl_down_sync(kWholeWarp, mine.bad, offset);
  }
  return mine;
}

// The sum over the block, in thread 0. To be called by all threads; blockDim.x is a multiple of 32.
__device__ Partial block_sum(Partial mine) {
  __shared__ Partial warps[32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  mine = warp_sum(mine);
  if (lane == 0) warps[warp] = mine;
  __syncthreads();
  if (warp == 0) mine = warp_sum(lane < blockDim.x / 32 ? warps[lane] : Partial{0, 0});
  return mine;
}

template <class T, bool Rewrite, class Table>
__global__ void __launch_bounds__(kThreads)
    check_kernel(const __grid_constant__ Table table, const __grid_constant__ DeviceScalar inv_scale,
                 Partial* partials) {
  const auto inverse = static_cast<compute_t<T>>(inv_scale.get());
  const Partial total =
      block_sum(check_chunk<Rewrite, T>(view_chunk<T>(table, blockIdx.x), inverse, threadIdx.x, blockDim.x));
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kFinalThreads)
    conclude_kernel(const Partial* partials, uint32_t count, const __grid_constant__ DeviceScalar inv_scale,
                    double max_norm, const __grid_constant__ VerdictAddress address, bool wide) {
  Partial mine{0, 0};
  for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) mine.add(partials[i]);
  const Partial total = block_sum(mine);
  if (threadIdx.x != 0) return;
  const Verdict verdict = conclude(total, inv_scale.get(), max_norm);
  const auto put = [wide](void* to, double value) {
    if (to == nullptr) return;
    if (wide) {
      *static_cast<double*>(to) = value;
    } else {
      *static_cast<float*>(to) = static_cast<float>(value);
    }
  };
  *address.found_inf = verdict.found_inf;
  put(address.grad_norm, verdict.grad_norm);
  put(address.grad_factor, verdict.grad_factor);
}

template <class T, class Table>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ Table table, const __grid_constant__ DeviceScalar factor) {
  const auto value = static_cast<compute_t<T>>(factor.get());
  if (value == 1) return;
  scale_chunk<T>(view_chunk<T>(table, blockIdx.x), value, threadIdx.x, blockDim.x);
}

using GradTable = TensorTable<1, kTableCapacity<1>>;
static_assert(sizeof(GradTable) + sizeof(DeviceScalar) + 64 <= 32764,
              "kernel arguments are limited to 32,764 bytes");

// Launches one check_kernel per table: the next one's partial sums follow.
template <class T>
void launch_checks(const std::vector<FlatTensor>& tensors, bool rewrite, const DeviceScalar& inv_scale,
                   Partial* partials, cudaStream_t stream) {
  for_each_table<GradTable>(tensors, sizeof(T), [&](const GradTable& table, uint32_t chunks) {
    if (rewrite) {
      check_kernel<T, true, GradTable><<<chunks, kThreads, 0, stream>>>(table, inv_scale, partials);
    } else {
      check_kernel<T, false, GradTable><<<chunks, kThreads, 0, stream>>>(table, inv_scale, partials);
    }
    check_cuda(cudaGetLastError(), "launch of check_kernel");
    partials += chunks;
  });
}

template <class T>
void launch_scales(const std::vector<FlatTensor>& tensors, const DeviceScalar& factor, cudaStream_t stream) {
  for_each_table<GradTable>(tensors, sizeof(T), [&](const GradTable& table, uint32_t chunks) {
    scale_kernel<T, GradTable><<<chunks, kThreads, 0, stream>>>(table, factor);
    check_cuda(cudaGetLastError(), "launch of scale_kernel");
  });
}

template <class Body>
void with_element(Element element, const Body& body) {
  switch (element) {
    case Element::kFloat:
      return body(float{});
    case Element::kDouble:
      return body(double{});
    case Element::kHalf:
      return body(f16{});
    case Element::kBfloat:
      return body(bf16{});
  }
}

}  // namespace

void launch_check(const std::vector<FlatTensor>& tensors, Element element, bool rewrite,
                  const DeviceScalar& inv_scale, double max_norm, Partial* partials,
                  const VerdictAddress& verdict, cudaStream_t stream) {
  with_element(element, [&](auto value) {
    launch_checks<decltype(value)>(tensors, rewrite, inv_scale, partials, stream);
  });
  uint32_t chunks = 0;
  for (const FlatTensor& tensor : tensors) chunks += chunks_of(tensor.numel);
  conclude_kernel<<<1, kFinalThreads, 0, stream>>>(partials, chunks, inv_scale, max_norm, verdict,
                                                   element == Element::kDouble);
  check_cuda(cudaGetLastError(), "launch of conclude_kernel");
}

void launch_scale(const std::vector<FlatTensor>& tensors, Element element, const DeviceScalar& factor,
                  cudaStream_t stream) {
  with_element(element, [&](auto value) { launch_scales<decltype(value)>(tensors, factor, stream); });
}

bool kernels_run() {
  int driver = 0, runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || cudaRuntimeGetVersion(&runtime) != cudaSuccess)
    return false;
  // Minor versions are compatible within a major one; the table-sized kernel arguments need 12.1.
  if (driver / 1000 < runtime / 1000 || driver < 12010) return false;
  cudaFuncAttributes attributes;
  const bool loaded = cudaFuncGetAttributes(&attributes, conclude_kernel) == cudaSuccess;
  cudaGetLastError();  // a missing architecture is an answer, not an error to leave behind
  return loaded;
}

}  // namespace flatout
