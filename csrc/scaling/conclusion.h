// conclusion.h: the state that all launches of one check or one call of grad_norms share, and the results
// from their partial sums.
#pragma once

#include "scaling/loss_scale.h"
#include "scaling/norm.h"

namespace flatout {

// Number of counters in a device's code. Each stream takes one counter, and torch has fewer streams.
inline constexpr uint32_t kKeptCounters = 1024;

// Counter of finished work. Its value is 0 before the first launch and after the last one.
struct Counter {
  uint32_t* own = nullptr;  // null: the kept counter with the number `kept`
  uint32_t kept = 0;
};

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

// State that all launches of one call of grad_norms share.
struct Norms {
  Partial* partials;  // one per chunk of a launch
  Counter counter;
  DeviceScalar inv_scale;
  void* norms;  // of all gradients; double if `wide`, else float
  bool wide;
  bool writes_empty;  // writes 0 for gradients without elements

  // Returns a copy without the gradients before `first`.
  FLATOUT_HD Norms from(uint32_t first) const {
    Norms rest = *this;
    rest.norms = static_cast<char*>(norms) + uint64_t{first} * (wide ? sizeof(double) : sizeof(float));
    return rest;
  }

  // Writes the norm of a gradient from the sum of its chunks.
  template <Norm kNorm>
  FLATOUT_HD void write(uint32_t tensor, uint32_t chunks, const Partial& total) const {
    if (chunks == 0 && !writes_empty) return;
    const double norm = conclude<kNorm>(total, 1, -1).grad_norm;
    if (wide) {
      static_cast<double*>(norms)[tensor] = norm;
    } else {
      static_cast<float*>(norms)[tensor] = static_cast<float>(norm);
    }
  }
};

}  // namespace flatout
