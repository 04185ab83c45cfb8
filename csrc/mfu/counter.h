// counter.h: what training steps took, as a rolling window and as totals. Times come from outside
// (step_timer.h).
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <vector>

namespace flatout::mfu {

inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// What the time of a step goes to; kHostIdle is what no other phase covers. The Python face names them in
// this order.
enum class Phase : std::uint8_t { kLoaderWait, kH2d, kForward, kBackward, kUpdate, kHostIdle };
inline constexpr std::size_t kPhases = 6;
using PhaseSeconds = std::array<double, kPhases>;

// What a step did.
struct Work {
  std::int64_t samples = 0;
  std::int64_t tokens = 0;
  double flops = kUnknown;           // of the model, NaN when not known
  double hardware_flops = kUnknown;  // what is computed again included
};

// One finished step.
struct Step {
  Work work;
  double seconds = 0;     // from its beginning to its end, on the device's clock
  double gap = kUnknown;  // seconds of the device between the last end of a step and its beginning: negative
                          // where steps overlap, NaN where it is not training time (nothing before, an
                          // evaluation in between)
  double waited = 0;      // seconds that the host waited for the loader meanwhile
  std::optional<PhaseSeconds> phases;  // of gap and step, where they were measured

  // Seconds before its beginning that count. No time counts twice.
  double lead() const { return std::isnan(gap) ? waited : gap; }
};

// Rates over a number of steps; NaN where nothing is known.
struct Reading {
  std::int64_t steps = 0;
  std::int64_t samples = 0;
  std::int64_t tokens = 0;
  double seconds = 0;              // steps and the gaps before them, overlaps counted once
  double step_seconds = kUnknown;  // median over a window, mean over a total; without the gap
  double samples_per_second = kUnknown;
  double tokens_per_second = kUnknown;
  double flops_per_second = kUnknown;           // over the steps whose FLOPs are known
  double hardware_flops_per_second = kUnknown;  // likewise
  double stall_fraction = kUnknown;             // 0..1: waits for the loader / seconds
  std::int64_t phase_steps = 0;                 // steps whose phases were measured
  PhaseSeconds phases{};                        // their mean
};

// Sums over steps.
class Sums {
 public:
  void add(const Step& step);
  // All but step_seconds.
  Reading reading() const;
  double step_seconds() const { return step_seconds_; }

 private:
  // FLOPs and the time of the steps that they are known of.
  struct Known {
    double flops = 0, seconds = 0;
    void add(double more, double period);
    double rate() const { return seconds > 0 ? flops / seconds : kUnknown; }
  };

  std::int64_t steps_ = 0, samples_ = 0, tokens_ = 0, phase_steps_ = 0;
  double seconds_ = 0, step_seconds_ = 0, stall_ = 0;
  Known model_, hardware_;
  PhaseSeconds phases_{};
};

// Thread-safe.
class Counter {
 public:
  explicit Counter(std::size_t window);  // at least 1

  void add(Step step);
  void reset();

  Reading window() const;
  Reading total() const;

 private:
  mutable std::mutex mutex_;
  const std::size_t capacity_;
  std::vector<Step> ring_;  // the last `capacity_` steps, the oldest at `oldest_` once it is full
  std::size_t oldest_ = 0;
  Sums total_;
};

}  // namespace flatout::mfu
