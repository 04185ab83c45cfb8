// counter.h: times and work of training steps, over a rolling window and in total. step_timer.h measures the
// times.
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

// Phases of a step. kHostIdle is the time that no other phase covers. Python has the names of the phases in
// this order.
enum class Phase : std::uint8_t { kLoaderWait, kH2d, kForward, kBackward, kUpdate, kHostIdle };
inline constexpr std::size_t kPhases = 6;
using PhaseSeconds = std::array<double, kPhases>;

// Work of a step.
struct Work {
  std::int64_t samples = 0;
  std::int64_t tokens = 0;
  double flops = kUnknown;           // of the model; NaN if unknown
  double hardware_flops = kUnknown;  // including recomputation
};

// One finished step.
struct Step {
  Work work;
  double seconds = 0;  // from the step's beginning to its end, on the device's clock
  // Seconds of the device from the last end of a step to the beginning of this step. Negative if steps
  // overlap. NaN if this is not training time: before the first step, or after an evaluation.
  double gap = kUnknown;
  double waited = 0;                   // seconds that the host waited for the loader since the step before
  std::optional<PhaseSeconds> phases;  // of gap and step, if measured

  // Returns the seconds before the step's beginning that count for the step. No time counts twice.
  double lead() const { return std::isnan(gap) ? waited : gap; }
};

// Rates over a number of steps. An unknown rate is NaN.
struct Reading {
  std::int64_t steps = 0;
  std::int64_t samples = 0;
  std::int64_t tokens = 0;
  double seconds = 0;              // steps and the gaps before them, overlaps counted once
  double step_seconds = kUnknown;  // median over a window, mean over a total; without the gap
  double samples_per_second = kUnknown;
  double tokens_per_second = kUnknown;
  double flops_per_second = kUnknown;           // over the steps whose FLOPs are known
  double hardware_flops_per_second = kUnknown;  // over the steps whose hardware FLOPs are known
  double stall_fraction = kUnknown;             // 0..1: waits for the loader / seconds
  std::int64_t phase_steps = 0;                 // steps whose phases were measured
  PhaseSeconds phases{};                        // mean over these steps
};

// Sums over steps.
class Sums {
 public:
  void add(const Step& step);
  // Returns all values but step_seconds.
  Reading reading() const;
  double step_seconds() const { return step_seconds_; }

 private:
  // FLOPs and time of the steps whose FLOPs are known.
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

// Counter of steps over a rolling window and in total. Thread-safe.
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
  std::vector<Step> ring_;  // the last `capacity_` steps; the oldest is at `oldest_` if it is full
  std::size_t oldest_ = 0;
  Sums total_;
};

}  // namespace flatout::mfu
