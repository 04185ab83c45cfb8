// counter.h: what training steps took, as a rolling window and as totals. Times come from outside
// (step_timer.h).
#pragma once

#include <cstdint>
#include <limits>
#include <mutex>
#include <vector>

namespace flatout::mfu {

inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// One finished step.
struct Step {
  double seconds;  // from its beginning to its end, on the device's clock
  double stall;    // seconds before it in which the device had nothing to do but wait for the loader
  double flops;    // floating-point operations of the model, NaN when not known
  std::int64_t samples;
};

// Rates over a number of steps; NaN where nothing is known. The time that counts is that of steps and stalls:
// what a loop does between steps (evaluation, checkpoints) is charged to neither.
struct Reading {
  std::int64_t steps = 0;
  std::int64_t samples = 0;
  double seconds = 0;              // steps and stalls together
  double step_seconds = kUnknown;  // median over a window, mean over a total
  double samples_per_second = kUnknown;
  double flops_per_second = kUnknown;
  double stall_fraction = kUnknown;  // stalls / seconds, 0..1
};

// Thread-safe.
class Counter {
 public:
  explicit Counter(std::size_t window) : capacity_(window) { ring_.reserve(window); }

  // `gap`: seconds of the device between the end of the step before and the beginning of this one, NaN for
  // the first. `waited`: seconds that the host waited for the loader meanwhile. A wait stalls the device only
  // as far as it shows in the gap: what a busy device did not notice costs nothing.
  void add(double seconds, double gap, double waited, std::int64_t samples, double flops);
  void reset();

  Reading window() const;
  Reading total() const;

 private:
  mutable std::mutex mutex_;
  const std::size_t capacity_;
  std::vector<Step> ring_;  // the last `capacity_` steps, the oldest at `oldest_` once it is full
  std::size_t oldest_ = 0;
  std::int64_t steps_ = 0;
  std::int64_t samples_ = 0;
  double seconds_ = 0;
  double stall_ = 0;
  double flops_ = 0;  // NaN for good once a step's FLOPs were not known
};

}  // namespace flatout::mfu
