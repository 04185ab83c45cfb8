// counter.cpp: the arithmetic behind every rate that flatout shows.
#include "mfu/counter.h"

#include <algorithm>
#include <cmath>

namespace flatout::mfu {
namespace {

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

Reading rates(std::int64_t steps, std::int64_t samples, double step_sum, double stall_sum, double flops) {
  Reading reading;
  reading.steps = steps;
  reading.samples = samples;
  reading.seconds = step_sum + stall_sum;
  if (reading.seconds > 0) {
    reading.samples_per_second = static_cast<double>(samples) / reading.seconds;
    reading.flops_per_second = flops / reading.seconds;
    reading.stall_fraction = stall_sum / reading.seconds;
  }
  return reading;
}

}  // namespace

void Counter::add(double seconds, double gap, double waited, std::int64_t samples, double flops) {
  // Two streams or a stepped clock can put an end before a beginning by a hair.
  seconds = std::max(seconds, 0.0);
  const double stall = std::isnan(gap) ? waited : std::clamp(gap, 0.0, waited);
  const Step step{.seconds = seconds, .stall = stall, .flops = flops, .samples = samples};

  const std::scoped_lock lock(mutex_);
  if (ring_.size() < capacity_) {
    ring_.push_back(step);
  } else {
    ring_[oldest_] = step;
    oldest_ = (oldest_ + 1) % capacity_;
  }
  ++steps_;
  samples_ += samples;
  seconds_ += seconds;
  stall_ += stall;
  flops_ += flops;
}

void Counter::reset() {
  const std::scoped_lock lock(mutex_);
  ring_.clear();
  oldest_ = 0;
  steps_ = samples_ = 0;
  seconds_ = stall_ = flops_ = 0;
}

Reading Counter::window() const {
  std::vector<double> durations;
  std::int64_t samples = 0;
  double step_sum = 0, stall_sum = 0, flops = 0;
  {
    const std::scoped_lock lock(mutex_);
    durations.reserve(ring_.size());
    for (const Step& step : ring_) {
      durations.push_back(step.seconds);
      samples += step.samples;
      step_sum += step.seconds;
      stall_sum += step.stall;
      flops += step.flops;
    }
  }
  Reading reading = rates(static_cast<std::int64_t>(durations.size()), samples, step_sum, stall_sum, flops);
  if (!durations.empty()) reading.step_seconds = median(durations);
  return reading;
}

Reading Counter::total() const {
  const std::scoped_lock lock(mutex_);
  Reading reading = rates(steps_, samples_, seconds_, stall_, flops_);
  if (steps_ > 0) reading.step_seconds = seconds_ / static_cast<double>(steps_);
  return reading;
}

}  // namespace flatout::mfu
