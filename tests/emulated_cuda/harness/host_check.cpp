// host_check.cpp: checks and scaling on the host, with sums in the order of check.cu.
#include <algorithm>
#include <array>

#include "core/cuda_launch.h"
#include "host.h"

namespace harness {

using namespace flatout;

namespace {

// Returns the sum over the lanes of a warp, as lane 0 has it. A lane that would read past the end reads its
// own value, as with __shfl_down_sync.
template <Norm kNorm>
Partial warp_sum(const Partial* lanes) {
  Partial lane[32];
  std::copy(lanes, lanes + 32, lane);
  for (int offset = 16; offset > 0; offset /= 2) {
    const auto before = std::to_array(lane);
    for (int l = 0; l < 32; ++l) lane[l].add<kNorm>(before[l + offset < 32 ? l + offset : l]);
  }
  return lane[0];
}

// Returns the sum of share(thread) over the threads of a block.
template <Norm kNorm, class Share>
Partial block_sum(const Share& share) {
  Partial threads[kThreads], warps[32] = {};
  for (uint32_t thread = 0; thread < kThreads; ++thread) threads[thread] = share(thread);
  for (int warp = 0; warp < kThreads / 32; ++warp) warps[warp] = warp_sum<kNorm>(threads + warp * 32);
  return warp_sum<kNorm>(warps);
}

template <class T, Norm kNorm, bool Rewrite>
void check(const std::vector<FlatTensor>& tensors, const Conclusion& conclusion, uint32_t first_partial) {
  const auto inverse = static_cast<compute_t<T>>(conclusion.unscaling.get());
  for_each_table<GradTable<>>(tensors, [&](const auto& table) {
    for (uint32_t chunk = 0; chunk < table.chunks(); ++chunk) {
      const auto view = view_chunk<T>(table, chunk);
      conclusion.partials[first_partial++] = block_sum<kNorm>(
          [&](uint32_t thread) { return check_chunk<kNorm, Rewrite, T>(view, inverse, thread, kThreads); });
      if (++*conclusion.finished.own != conclusion.chunks) continue;
      *conclusion.finished.own = 0;
      conclusion.write<kNorm>(block_sum<kNorm>([&](uint32_t thread) {
        return add_partials<kNorm, 8>(conclusion.partials, conclusion.chunks, thread, kThreads);
      }));
    }
  });
}

}  // namespace

template <class T>
void check_on_host(const std::vector<FlatTensor>& tensors, Norm norm, bool rewrite,
                   const Conclusion& conclusion, uint32_t first_partial) {
  if (rewrite) return check<T, Norm::kTwo, true>(tensors, conclusion, first_partial);
  with_norm(norm,
            [&](auto kind) { check<T, decltype(kind)::value, false>(tensors, conclusion, first_partial); });
}

template <class T>
void norms_on_host(const std::vector<FlatTensor>& tensors, Norm norm, const Norms& norms) {
  const auto inverse = static_cast<compute_t<T>>(norms.inv_scale.get());
  with_norm(norm, [&]<Norm kNorm>(std::integral_constant<Norm, kNorm>) {
    uint32_t first = 0;
    for_each_table<GradTable<>>(tensors, [&](const auto& table) {
      for (uint32_t chunk = 0; chunk < table.chunks(); ++chunk)
        norms.partials[chunk] = block_sum<kNorm>([&](uint32_t thread) {
          return check_chunk<kNorm, false, T>(view_chunk<T>(table, chunk), inverse, thread, kThreads);
        });
      for (uint32_t t = 0; t < table.tensors; ++t) {
        const uint32_t begin = table.first_chunk[t], chunks = table.first_chunk[t + 1] - begin;
        Partial lanes[32];
        for (uint32_t lane = 0; lane < 32; ++lane)
          lanes[lane] = add_partials<kNorm, 8>(norms.partials + begin, chunks, lane, 32);
        norms.from(first).template write<kNorm>(t, chunks, warp_sum<kNorm>(lanes));
      }
      first += table.tensors;
    });
  });
}

template <class T>
void scale_on_host(const std::vector<FlatTensor>& tensors, const DeviceScalar& factor) {
  const auto value = static_cast<compute_t<T>>(factor.get());
  for_each_table<GradTable<>>(tensors, [&](const auto& table) {
    if (value == 1) return;
    for (uint32_t block = 0; block < table.chunks(); ++block)
      for (uint32_t thread = 0; thread < kThreads; ++thread)
        scale_chunk<T>(view_chunk<T>(table, block), value, thread, kThreads);
  });
}

#define INSTANTIATE(T)                                                                                     \
  template void check_on_host<T>(const std::vector<FlatTensor>&, Norm, bool, const Conclusion&, uint32_t); \
  template void norms_on_host<T>(const std::vector<FlatTensor>&, Norm, const Norms&);                      \
  template void scale_on_host<T>(const std::vector<FlatTensor>&, const DeviceScalar&)
INSTANTIATE(float);
INSTANTIATE(double);
INSTANTIATE(f16);
INSTANTIATE(bf16);

}  // namespace harness
