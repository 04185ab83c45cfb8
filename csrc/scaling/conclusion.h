// conclusion.h: what all launches of one check share, and the verdict from their partial sums.
#pragma once

#include "scaling/loss_scale.h"
#include "scaling/norm.h"

namespace flatout {

// Counters that the device's code has: more than torch has streams.
inline constexpr uint32_t kKeptCounters = 1024;

// What all launches of one check share. Whichever block finishes last, counted over all of them, concludes.
struct Conclusion {
  Partial* partials;  // one per chunk of all lists
  uint32_t chunks;    // of all lists
  // Counts chunks that have left their partial: 0 before the first launch and after the last. Null: the
  // counter is the one with the number `kept_counter` among those of the device's code.
  uint32_t* finished;
  uint32_t kept_counter;
  Unscaling unscaling;
  double max_norm;  // < 0: no clipping
  VerdictAddress verdict;

  // The thread's share of all partials. Several are loaded at once, because one block waits for all of them.
  template <Norm kNorm, uint32_t kTogether = 8>
  FLATOUT_HD Partial add_partials(uint32_t thread, uint32_t threads) const {
    Partial mine{0, 0};
    uint64_t i = thread;
    for (; i + (kTogether - 1) * threads < chunks; i += kTogether * threads) {
      Partial loaded[kTogether];
      FLATOUT_UNROLL
      for (uint32_t n = 0; n < kTogether; ++n) loaded[n] = partials[i + n * threads];
      FLATOUT_UNROLL
      for (uint32_t n = 0; n < kTogether; ++n) mine.template add<kNorm>(loaded[n]);
    }
    for (; i < chunks; i += threads) mine.template add<kNorm>(partials[i]);
    return mine;
  }

  template <Norm kNorm>
  FLATOUT_HD void write(const Partial& total) const {
    const Verdict found = conclude<kNorm>(total, unscaling.get(), max_norm);
    verdict.write(found);
    if (unscaling.loss_scale.scale != nullptr) unscaling.loss_scale.write_next(found.found_inf != 0);
  }
};

}  // namespace flatout
