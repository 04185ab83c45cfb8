// check_chunk.h: the work of one thread of a CUDA block that checks or scales gradients.
#pragma once

#include "scaling/grad_table.h"
#include "scaling/norm.h"

namespace flatout {

// Number of chunks that one block checks. The number is 2 for 16-bit gradients, so that a block reads as many
// bytes as for float32.
template <class T>
inline constexpr uint32_t kChunksOfBlock = sizeof(T) == 2 ? 2 : 1;

template <class T>
FLATOUT_HD uint32_t check_blocks(uint32_t chunks) {
  return chunks / kChunksOfBlock<T> + (chunks % kChunksOfBlock<T> != 0 ? 1 : 0);
}

// Returns the thread's share of the chunk's norm and finiteness. With Rewrite, also multiplies the gradients
// in memory by inv_scale. Rewrite is a template argument, because its registers would halve the occupancy of
// other checks.
template <Norm kNorm, bool Rewrite, class T>
FLATOUT_HD Partial check_chunk(const ChunkView<T>& view, compute_t<T> inv_scale, uint32_t thread,
                               uint32_t threads) {
  using Acc = compute_t<T>;
  using Vector = Pack<T>;
  const bool write = Rewrite && inv_scale != 1;  // a factor of 1 changes nothing
  T* x = view.gradients;
  Lane<kNorm, Acc> lane{0, 0};
  for_each_vector<Vector::kWidth, kBatch<1>>(
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

template <class T>
FLATOUT_HD void scale_chunk(const ChunkView<T>& view, compute_t<T> factor, uint32_t thread,
                            uint32_t threads) {
  using Vector = Pack<T>;
  T* x = view.gradients;
  for_each_vector<Vector::kWidth, kBatch<1>>(
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
