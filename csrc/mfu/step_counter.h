// step_counter.h: a counter with its timer, as Python's loops use it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "mfu/counter.h"
#include "mfu/step_timer.h"

namespace flatout::mfu {

// Every call takes a few hundred nanoseconds and waits for nothing: the GIL stays held.
class StepCounter {
 public:
  using Token = StepTimer::Token;

  explicit StepCounter(std::size_t window)
      : counter_(window), own_(make_host_timer(counter_)), timer_(own_.get()) {}

  // Instead of the host's clock. `current_stream(device)` is the cudaStream_t that work goes to.
  void use_events(int device, pybind11::object current_stream) {
    own_ = make_event_timer(counter_, device);
    timer_ = own_.get();
    current_stream_ = std::move(current_stream);
    device_ = pybind11::int_(device);
  }
  // A timer of Python's, which the caller keeps alive; it hands its steps to `add`.
  void use_timer(StepTimer* timer) { timer_ = timer; }

  void measure_phases_every(std::int64_t steps) { timer_->measure_phases_every(steps); }
  void pause() { timer_->pause(); }
  void add(const Step& step) { counter_.add(step); }

  // Called in every step.
  Token begin() { return timer_->begin(stream()); }
  bool measures_phases(Token token) { return timer_->measures_phases(token); }
  void mark(Token token, std::int64_t phase) { timer_->mark(token, static_cast<Phase>(phase), stream()); }
  void touch(Token token) { timer_->touch(token, stream()); }
  void finish(Token token, std::int64_t samples, std::int64_t tokens, double flops, double hardware_flops) {
    timer_->finish(token, Work{samples, tokens, flops, hardware_flops});
  }
  void end(Token token, const Work& work) {
    timer_->touch(token, stream());
    timer_->finish(token, work);
  }
  void drop(Token token) { timer_->drop(token); }
  void waited(double seconds) { timer_->waited(seconds); }

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
