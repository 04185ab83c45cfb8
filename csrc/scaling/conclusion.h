// conclusion.h: the state that all launches of one check share, and the result from their partial sums.
#pragma once

#include "scaling/counter.h"
#include "scaling/loss_scale.h"
#include "scaling/norm.h"

namespace flatout {

// Adds the thread's share of the partials. Loads several at once, because a single block waits for all loads.
template <Norm kNorm, uint32_t kTogether>
FLATOUT_HD Partial add_partials(const Partial* partials, uint32_t count, uint32_t thread, uint64_t threads) {
  Partial mine{0, 0};
  uint64_t i = thread;
  for (; i + (kTogether - 1) * threads < count; i += kTogether * threads) {
    Partial loaded[kTogether];
    FLATOUT_UNROLL
    for (uint32_t n = 0; n < kTogether; ++n) loaded[n] = partials[i + n * threads];
    FLATOUT_UNROLL
    for (uint32_t n = 0; n < kTogether; ++n) mine.add<kNorm>(loaded[n]);
  }
  for (; i < count; i += threads) mine.add<kNorm>(partials[i]);
  return mine;
}

// State that all launches of one check share. The block that finishes last, over all launches, writes the
// verdict.
struct Conclusion {
  Partial* partials;  // one per chunk of all lists
  uint32_t chunks;    // of all lists
  Counter finished;   // chunks whose partials are written
  Unscaling unscaling;
  double max_norm;  // < 0: no clipping
  VerdictAddress verdict;

  template <Norm kNorm>
  FLATOUT_HD void write(const Partial& total) const {
    const Verdict found = conclude<kNorm>(total, unscaling.get(), max_norm);
    verdict.write(found);
    if (unscaling.loss_scale.scale != nullptr) unscaling.loss_scale.write_next(found.found_inf != 0);
  }
};

}  // namespace flatout
