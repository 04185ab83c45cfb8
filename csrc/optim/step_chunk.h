// step_chunk.h: what one thread does with one chunk in an optimizer step. The CUDA kernel is this and a
// prologue.
#pragma once

#include "core/chunks.h"

namespace flatout {

// Every stream is read, all but the gradient (stream 1) are written.
template <class T, class Rule>
FLATOUT_HD void step_chunk(const ChunkView<T, Rule::kStreams>& view, const Rule& rule, uint32_t thread,
                           uint32_t threads) {
  constexpr int kStreams = Rule::kStreams;
  using Acc = typename Rule::acc;
  using Vector = Pack<T>;
  const Split split = split_chunk<T, kStreams>(view.stream, view.count);
  walk<Vector::kWidth, kBatch<kStreams>>(
      split, thread, threads,
      [&](uint32_t i) {
        Acc x[kStreams];
        for (int s = 0; s < kStreams; ++s) x[s] = load(view.stream[s][i]);
        rule(x);
        for (int s = 0; s < kStreams; ++s)
          if (s != 1) store(view.stream[s][i], x[s]);
      },
      [&](auto batch, uint32_t i, uint32_t stride) {
        constexpr int kCount = decltype(batch)::value;
        Vector packs[kCount][kStreams];
        for (int b = 0; b < kCount; ++b)
          for (int s = 0; s < kStreams; ++s)
            packs[b][s] = *reinterpret_cast<const Vector*>(view.stream[s] + i + b * stride);
        for (int b = 0; b < kCount; ++b) {
          Vector(&pack)[kStreams] = packs[b];
          for (int l = 0; l < Vector::kWidth; ++l) {
            Acc x[kStreams];
            for (int s = 0; s < kStreams; ++s) x[s] = load(pack[s].lane[l]);
            rule(x);
            for (int s = 0; s < kStreams; ++s)
              if (s != 1) store(pack[s].lane[l], x[s]);
          }
          for (int s = 0; s < kStreams; ++s)
            if (s != 1) *reinterpret_cast<Vector*>(view.stream[s] + i + b * stride) = pack[s];
        }
      });
}

}  // namespace flatout
