// step_counter.h: a counter and its timer, for training loops in Python.
#pragma once

#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>

#include "mfu/counter.h"
#include "mfu/step_timer.h"

namespace flatout::mfu {

// Counter with its timer. A call takes a few hundred nanoseconds and never waits, so it keeps the GIL.
class StepCounter {
 public:
  using Token = StepTimer::Token;

  // All methods throw std::invalid_argument if a number is out of range.
  explicit StepCounter(std::size_t window)
      : counter_(window), own_(make_host_timer(counter_)), timer_(own_.get()) {}

  // Replaces the host's clock with CUDA events. `current_stream(device)` must return the cudaStream_t of new
  // work.
  void use_events(int device, pybind11::object current_stream) {
    own_ = make_event_timer(counter_, device);
    timer_ = own_.get();
    current_stream_ = std::move(current_stream);
    device_ = pybind11::int_(device);
  }
  // Uses a timer that is written in Python and passes its steps to `add`. The caller must keep the timer
  // alive.
  void use_timer(StepTimer* timer) { timer_ = timer; }

  void measure_phases_every(std::int64_t steps) {
    require(steps >= 0, "steps must be >= 0");
    timer_->measure_phases_every(steps);
  }
  void pause() { timer_->pause(); }
  void add(const Step& step) {
    check(step.work);
    require(std::isfinite(step.seconds), "seconds must be finite");
    require(!std::isinf(step.gap), "gap must be finite or None");
    require_duration(step.waited, "waited must be finite and >= 0");
    if (step.phases)
      for (const double seconds : *step.phases) require_duration(seconds, "phases must be finite and >= 0");
    counter_.add(step);
  }

  // Called in every step. Each method gets the stream first, because this runs Python code, which may replace
  // the timer.
  Token begin() {
    const std::uintptr_t where = stream();
    return timer_->begin(where);
  }
  bool measures_phases(Token token) { return timer_->measures_phases(token); }
  void mark(Token token, std::int64_t phase) {
    require(phase >= 0 && phase < static_cast<std::int64_t>(kPhases), "phase must be an index of PHASES");
    const std::uintptr_t where = stream();
    timer_->mark(token, static_cast<Phase>(phase), where);
  }
  void touch(Token token) {
    const std::uintptr_t where = stream();
    timer_->touch(token, where);
  }
  void finish(Token token, std::int64_t samples, std::int64_t tokens, double flops, double hardware_flops) {
    const Work work{samples, tokens, flops, hardware_flops};
    check(work);
    timer_->finish(token, work);
  }
  void end(Token token, const Work& work) {
    touch(token);
    timer_->finish(token, work);
  }
  void drop(Token token) { timer_->drop(token); }
  void waited(double seconds) {
    require_duration(seconds, "seconds must be finite and >= 0");
    timer_->waited(seconds);
  }

  void reset() {
    timer_->reset();
    counter_.reset();
  }

  Reading window() {
    timer_->poll();
    return counter_.window();
  }

  Reading total() {
    timer_->poll();
    return counter_.total();
  }

 private:
  static void require(bool fits, const char* otherwise) {
    if (!fits) throw std::invalid_argument(otherwise);
  }
  static void require_duration(double seconds, const char* otherwise) {
    require(std::isfinite(seconds) && seconds >= 0, otherwise);
  }
  static void check(const Work& work) {
    require(work.samples >= 0 && work.tokens >= 0, "samples and tokens must be >= 0");
    require(!std::isinf(work.flops) && !std::isinf(work.hardware_flops), "flops must be finite or None");
  }

  std::uintptr_t stream() const {
    if (!current_stream_) return 0;
    const auto stream = pybind11::reinterpret_steal<pybind11::object>(
        PyObject_CallOneArg(current_stream_.ptr(), device_.ptr()));
    if (!stream) throw pybind11::error_already_set();
    const std::uintptr_t handle = PyLong_AsUnsignedLongLong(stream.ptr());
    if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
    return handle;
  }

  Counter counter_;
  std::unique_ptr<StepTimer> own_;  // refers to counter_
  StepTimer* timer_;
  pybind11::object current_stream_, device_;
};

}  // namespace flatout::mfu
