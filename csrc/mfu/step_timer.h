// step_timer.h: measures steps and their phases on the host's or the device's clock, and adds them to a
// Counter. Never waits.
#pragma once

#include <cstdint>
#include <memory>

#include "mfu/counter.h"

namespace flatout::mfu {

// Timer of steps. Thread-safe. A token identifies a step between its begin and its end. `stream` is the
// cudaStream_t of new work. The host's clock ignores `stream`.
class StepTimer {
 public:
  using Token = std::int64_t;
  static constexpr Token kNext = 0;  // the step that begins next

  virtual ~StepTimer() = default;
  virtual Token begin(std::uintptr_t stream) = 0;
  // Measures phases in the second step, and in every `steps`-th step after it. 1 means every step, and 0
  // means no step.
  virtual void measure_phases_every(std::int64_t steps) = 0;
  virtual bool measures_phases(Token token) = 0;
  // Begins a phase now. Does nothing in a step whose phases are not measured.
  virtual void mark(Token token, Phase phase, std::uintptr_t stream) = 0;
  // Sets the end of the step to now. A later call replaces this end.
  virtual void touch(Token token, std::uintptr_t stream) = 0;
  // Completes the step, which ends at its last touch.
  virtual void finish(Token token, const Work& work) = 0;
  // Forgets a step that ended in an exception.
  virtual void drop(Token token) = 0;
  // Adds a wait of the host for the loader to the step that begins next.
  virtual void waited(double seconds) = 0;
  // Excludes the time since the last step, which was not training.
  virtual void pause() = 0;
  // Adds all steps that the device has finished by now to the counter.
  virtual void poll() = 0;
  // Forgets waits, open gaps and running steps, so that the next step counts as the first one.
  virtual void reset() = 0;
};

// Returns a timer on the host's steady clock.
std::unique_ptr<StepTimer> make_host_timer(Counter& counter);

// Returns a timer that polls CUDA events. Throws std::runtime_error if the CUDA runtime in this library
// cannot use `device`.
std::unique_ptr<StepTimer> make_event_timer(Counter& counter, int device);

}  // namespace flatout::mfu
