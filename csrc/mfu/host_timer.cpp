// host_timer.cpp: step times on the host's steady clock, for the CPU, whose work ends before a call returns.
#include <chrono>

#include "mfu/clock_timer.h"

namespace flatout::mfu {
namespace {

struct HostClock {
  using Instant = std::chrono::steady_clock::time_point;

  Instant now(std::uintptr_t) const { return std::chrono::steady_clock::now(); }
  std::optional<double> seconds(Instant from, Instant to) const {
    return std::chrono::duration<double>(to - from).count();
  }
  void recycle(Instant) const {}
  bool is_recording(std::uintptr_t) const { return false; }
  int enter() const { return 0; }
};

}  // namespace

std::unique_ptr<StepTimer> make_host_timer(Counter& counter) {
  return std::make_unique<ClockTimer<HostClock>>(counter);
}

}  // namespace flatout::mfu
