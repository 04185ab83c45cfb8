// counter.cpp: the arithmetic of every rate that flatout reports.
#include "mfu/counter.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace flatout::mfu {
namespace {

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

double rate(std::int64_t count, double seconds) { return static_cast<double>(count) / seconds; }

}  // namespace

void Sums::Known::add(double more, double period) {
  if (std::isnan(more)) return;
  flops += more;
  seconds += period;
}

void Sums::add(const Step& step) {
  // A wait stalls the device only for the part that is visible in the gap. A wait beside a busy device costs
  // nothing.
  const double period = step.seconds + step.lead();
  ++steps_;
  samples_ += step.work.samples;
  tokens_ += step.work.tokens;
  seconds_ += period;
  step_seconds_ += step.seconds;
  stall_ += std::min(std::max(step.lead(), 0.0), step.waited);
  model_.add(step.work.flops, period);
  hardware_.add(step.work.hardware_flops, period);
  if (step.phases) {
    ++phase_steps_;
    for (std::size_t i = 0; i < kPhases; ++i) phases_[i] += (*step.phases)[i];
  }
}

Reading Sums::reading() const {
  Reading reading;
  reading.steps = steps_;
  reading.samples = samples_;
  reading.tokens = tokens_;
  reading.seconds = seconds_;
  if (seconds_ > 0) {
    reading.samples_per_second = rate(samples_, seconds_);
    reading.tokens_per_second = rate(tokens_, seconds_);
    reading.stall_fraction = stall_ / seconds_;
  }
  reading.flops_per_second = model_.rate();
  reading.hardware_flops_per_second = hardware_.rate();
  reading.phase_steps = phase_steps_;
  if (phase_steps_ > 0) {
    for (std::size_t i = 0; i < kPhases; ++i) {
      reading.phases[i] = phases_[i] / static_cast<double>(phase_steps_);
    }
  }
  return reading;
}

Counter::Counter(std::size_t window) : capacity_(window) {
  if (window == 0) throw std::invalid_argument("window must be >= 1, got 0");
  ring_.reserve(window);
}

void Counter::add(Step step) {
  // With two streams, a step can end before its beginning. With two threads, a step can end before the end of
  // a step that is already counted.
  step.seconds = std::max(step.seconds, 0.0);
  if (step.gap < -step.seconds) step.gap = -step.seconds;

  const std::scoped_lock lock(mutex_);
  if (ring_.size() < capacity_) {
    ring_.push_back(step);
  } else {
    ring_[oldest_] = step;
    oldest_ = (oldest_ + 1) % capacity_;
  }
  total_.add(step);
}

void Counter::reset() {
  const std::scoped_lock lock(mutex_);
  ring_.clear();
  oldest_ = 0;
  total_ = {};
}

Reading Counter::window() const {
  Sums sums;
  std::vector<double> durations;
  {
    const std::scoped_lock lock(mutex_);
    durations.reserve(ring_.size());
    for (const Step& step : ring_) {
      durations.push_back(step.seconds);
      sums.add(step);
    }
  }
  Reading reading = sums.reading();
  if (!durations.empty()) reading.step_seconds = median(durations);
  return reading;
}

Reading Counter::total() const {
  const std::scoped_lock lock(mutex_);
  Reading reading = total_.reading();
  if (reading.steps > 0) reading.step_seconds = total_.step_seconds() / static_cast<double>(reading.steps);
  return reading;
}

}  // namespace flatout::mfu
