// event_timer.cpp: step times on the GPU's clock, from CUDA events on the step's stream. The host polls the
// events and never waits for them.
#include "mfu/step_timer.h"

#ifndef FLATOUT_WITH_CUDA

#include <stdexcept>

namespace flatout::mfu {

std::unique_ptr<StepTimer> make_event_timer(Counter&, int) {
  throw std::runtime_error("flatout was built without CUDA");
}

}  // namespace flatout::mfu

#else

#include "core/cuda_runtime.h"
#include "core/fork_guard.h"
#include "mfu/clock_timer.h"

namespace flatout::mfu {
namespace {

// Clock with a pool of events. The further the host is ahead of the device, the more events the pool holds.
class EventClock {
 public:
  using Instant = cudaEvent_t;

  explicit EventClock(int device) : device_(device) {
    const DeviceGuard guard(device_);
    spare_.push_back(create());  // if the driver is too old, fails here instead of in the first step
  }

  // A forked child must not call CUDA.
  ~EventClock() {
    if (fork_guard_.forked()) return;
    const DeviceGuard guard(device_, std::nothrow);
    for (cudaEvent_t event : all_) static_cast<void>(cudaEventDestroy(event));
  }

  EventClock(const EventClock&) = delete;
  EventClock& operator=(const EventClock&) = delete;

  DeviceGuard enter() const { return DeviceGuard(device_); }

  Instant now(std::uintptr_t stream) {
    if (spare_.empty()) spare_.push_back(create());
    cudaEvent_t event = spare_.back();
    check_cuda(cudaEventRecord(event, reinterpret_cast<cudaStream_t>(stream)), "cudaEventRecord");
    spare_.pop_back();
    return event;
  }

  // Returns nullopt until the device has reached both events. The result is negative if events on different
  // streams are reached in the other order. Queries the events first, because compute-sanitizer reports a
  // time that is asked for too early as an error.
  std::optional<double> seconds(Instant from, Instant to) const {
    if (!is_reached(from) || !is_reached(to)) return std::nullopt;
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, from, to), "cudaEventElapsedTime");
    return milliseconds * 1e-3;
  }

  void recycle(Instant event) { spare_.push_back(event); }

  bool is_recording(std::uintptr_t stream) const {
    return is_capturing(reinterpret_cast<cudaStream_t>(stream));
  }

 private:
  cudaEvent_t create() {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDefault), "cudaEventCreate");
    all_.push_back(event);
    spare_.reserve(all_.size());  // so that recycling cannot fail
    return event;
  }

  const int device_;
  const ForkGuard fork_guard_;
  std::vector<cudaEvent_t> all_, spare_;
};

}  // namespace

std::unique_ptr<StepTimer> make_event_timer(Counter& counter, int device) {
  return std::make_unique<ClockTimer<EventClock> >(counter, device);
}

}  // namespace flatout::mfu

#endif
