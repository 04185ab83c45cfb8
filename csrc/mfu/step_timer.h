// step_timer.h: times steps and their phases on the host's or the device's clock and hands them to a Counter.
// Never waits.
#pragma once

#include <cstdint>
#include <memory>

#include "mfu/counter.h"

namespace flatout::mfu {

// Thread-safe; a token names a step between its begin and its end. `stream` is the cudaStream_t that the work
// of the moment goes to; the host's clock ignores it.
class StepTimer {
 public:
  using Token = std::int64_t;
  static constexpr Token kNext = 0;  // the step that begins next

  virtual ~StepTimer() = default;
  virtual Token begin(std::uintptr_t stream) = 0;
  // Phases are measured on the second step and every `steps`-th from there on; 1: on every step, 0: on none.
  virtual void measure_phases_every(std::int64_t steps) = 0;
  virtual bool measures_phases(Token token) = 0;
  // From here on it is this phase. Does nothing on a step whose phases are not measured.
  virtual void mark(Token token, Phase phase, std::uintptr_t stream) = 0;
  // The step ends here, unless it is told so once more.
  virtual void touch(Token token, std::uintptr_t stream) = 0;
  // The step is over: it ended where it was last touched.
  virtual void finish(Token token, const Work& work) = 0;
  // Forgets a step that ended in an exception.
  virtual void drop(Token token) = 0;
  // The host waited for the loader; charged to the step that begins next.
  virtual void waited(double seconds) = 0;
  // What has happened since the last step is not training.
  virtual void pause() = 0;
  // Hands over every step that the device has finished by now.
  virtual void poll() = 0;
  // Forgets waits, open gaps and steps under way, so that the next step is the first again.
  virtual void reset() = 0;
};

// The host's steady clock.
std::unique_ptr<StepTimer> make_host_timer(Counter& counter);

// CUDA events, polled. Throws std::runtime_error where the CUDA runtime in this library cannot use `device`.
std::unique_ptr<StepTimer> make_event_timer(Counter& counter, int device);

}  // namespace flatout::mfu
