// step_timer.h: times steps on the host's or the device's clock and hands them to a Counter. Never waits.
#pragma once

#include <cstdint>
#include <memory>

#include "mfu/counter.h"

namespace flatout::mfu {

// Thread-safe; a token names a step between its begin and its end.
class StepTimer {
 public:
  using Token = std::int64_t;

  virtual ~StepTimer() = default;
  // `stream`: the cudaStream_t that the step's work goes to; the host's clock ignores it.
  virtual Token begin(std::uintptr_t stream) = 0;
  virtual void end(Token token, std::uintptr_t stream, std::int64_t samples, double flops) = 0;
  // Forgets a step that ended in an exception.
  virtual void drop(Token token) = 0;
  // The host waited for the loader; charged to the step that ends next.
  virtual void waited(double seconds) = 0;
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
