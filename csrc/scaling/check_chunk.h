// check_chunk.h: what one thread does with one chunk of gradients. The CUDA kernels are this and a reduction.
#pragma once

#include "core/chunks.h"
#include "scaling/norm.h"

namespace flatout {

// The thread's share of the chunk's sum of squares and finiteness; with Rewrite gradients come back times
// inv_scale.
template <bool Rewrite, class T>
FLATOUT_HD Partial check_chunk(const ChunkView<T, 1>& view, compute_t<T> inv_scale, uint32_t thread,
                               uint32_t threads) {
  using Acc = compute_t<T>;
  using Vector = Pack<T>;
  const bool write = Rewrite && inv_scale != 1;  // times 1 changes nothing
  T* x = view.stream[0];
  Lane<Acc> lane{0, 0};
  walk<Vector::kWidth, kBatch<1>>(
      split_chunk<T, 1>(view.stream, view.count), thread, threads,
      [&](uint32_t i) {
        const Acc gradient = load(x[i]);
        const Acc unscaled = gradient * inv_scale;
        lane.add(gradient, unscaled);
        if (write) store(x[i], unscaled);
      },
      [&](auto batch, uint32_t i, uint32_t stride) {
        constexpr int kCount = decltype(batch)::value;
        Vector packs[kCount];
        for (int b = 0; b < kCount; ++b) packs[b] = *reinterpret_cast<const Vector*>(x + i + b * stride);
        for (int b = 0; b < kCount; ++b) {
          for (int l = 0; l < Vector::kWidth; ++l) {
            const Acc gradient = load(packs[b].lane[l]);
            const Acc unscaled = gradient * inv_scale;
            lane.add(gradient, unscaled);
            if (Rewrite) store(packs[b].lane[l], unscaled);
          }
          if (write) *reinterpret_cast<Vector*>(x + i + b * stride) = packs[b];
        }
      });
  return {static_cast<double>(lane.sum), static_cast<double>(lane.bad)};
}

template <class T>
FLATOUT_HD void scale_chunk(const ChunkView<T, 1>& view, compute_t<T> factor, uint32_t thread,
                            uint32_t threads) {
  using Vector = Pack<T>;
  T* x = view.stream[0];
  walk<Vector::kWidth, kBatch<1>>(
      split_chunk<T, 1>(view.stream, view.count), thread, threads,
      [&](uint32_t i) { store(x[i], load(x[i]) * factor); },
      [&](auto batch, uint32_t i, uint32_t stride) {
        constexpr int kCount = decltype(batch)::value;
        Vector packs[kCount];
        for (int b = 0; b < kCount; ++b) packs[b] = *reinterpret_cast<const Vector*>(x + i + b * stride);
        for (int b = 0; b < kCount; ++b) {
          for (T& value : packs[b].lane) store(value, load(value) * factor);
          *reinterpret_cast<Vector*>(x + i + b * stride) = packs[b];
        }
      });
}

}  // namespace flatout
