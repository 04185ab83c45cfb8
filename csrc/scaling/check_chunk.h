// check_chunk.h: what one thread of a CUDA block does with gradients, and later with the sums of all blocks.
// The kernels are this and reductions.
#pragma once

#include "scaling/grad_table.h"
#include "scaling/norm.h"

namespace flatout {

// The thread's share of the chunk's norm and finiteness; with Rewrite gradients come back times inv_scale.
// (A template: what rewriting needs would cost the mere check half of its threads, in registers.)
template <Norm kNorm, bool Rewrite, class T>
FLATOUT_HD Partial check_chunk(const ChunkView<T>& view, compute_t<T> inv_scale, uint32_t thread,
                               uint32_t threads) {
  using Acc = compute_t<T>;
  using Vector = Pack<T>;
  const bool write = Rewrite && inv_scale != 1;  // times 1 changes nothing
  T* x = view.gradients;
  Lane<kNorm, Acc> lane{0, 0};
  walk<Vector::kWidth, kBatch<1>>(
      split_chunk(x, sizeof(T), Vector::kWidth, view.count), thread, threads,
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
          for (T& value : packs[b].lane) {
            const Acc gradient = load(value);
            const Acc unscaled = gradient * inv_scale;
            lane.add(gradient, unscaled);
            if (Rewrite) store(value, unscaled);
          }
          if (write) *reinterpret_cast<Vector*>(x + i + b * stride) = packs[b];
        }
      });
  return {static_cast<double>(lane.norm), static_cast<double>(lane.bad)};
}

// What all launches of one check share. Whichever block finishes last, counted over all of them, concludes.
struct Conclusion {
  Partial* partials;   // one per chunk of all lists
  uint32_t chunks;     // of all lists
  uint32_t* finished;  // blocks that have left their partial; 0 before the first launch
  DeviceScalar inv_scale;
  double max_norm;  // < 0: no clipping
  VerdictAddress verdict;

  // The thread's share of all partials.
  template <Norm kNorm>
  FLATOUT_HD Partial add_partials(uint32_t thread, uint32_t threads) const {
    Partial mine{0, 0};
    for (uint32_t i = thread; i < chunks; i += threads) mine.template add<kNorm>(partials[i]);
    return mine;
  }

  template <Norm kNorm>
  FLATOUT_HD void write(const Partial& total) const {
    verdict.write(conclude<kNorm>(total, inv_scale.get(), max_norm));
  }
};

template <class T>
FLATOUT_HD void scale_chunk(const ChunkView<T>& view, compute_t<T> factor, uint32_t thread,
                            uint32_t threads) {
  using Vector = Pack<T>;
  T* x = view.gradients;
  walk<Vector::kWidth, kBatch<1>>(
      split_chunk(x, sizeof(T), Vector::kWidth, view.count), thread, threads,
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
