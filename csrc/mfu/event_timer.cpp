// event_timer.cpp: step times on the GPU's clock: CUDA events on the step's stream, polled, never waited for.
#include "mfu/step_timer.h"

#ifndef FLATOUT_WITH_CUDA

#include <stdexcept>

namespace flatout::mfu {

std::unique_ptr<StepTimer> make_event_timer(Counter&, int) {
  throw std::runtime_error("flatout was built without CUDA");
}

}  // namespace flatout::mfu

#else

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "mfu/clock_timer.h"

namespace flatout::mfu {
namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // or the next launch of anybody would report it
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// Makes `device` current, and relaxes stream capture: polling an event while another stream records a CUDA
// graph would otherwise break that capture.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device) {
      check(cudaSetDevice(device), "cudaSetDevice");
      switched_ = true;
    }
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
  }
  ~DeviceGuard() {
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
    if (switched_) static_cast<void>(cudaSetDevice(previous_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool switched_ = false;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// A pool of events; it grows to as many as the host ever was ahead of the device.
class EventClock {
 public:
  using Instant = cudaEvent_t;

  explicit EventClock(int device) : device_(device) {
    const DeviceGuard guard(device_);
    spare_.push_back(create());  // fails here, not in the first step, where the driver is too old
  }

  ~EventClock() {
    // At the interpreter's end the context may be gone already: nothing to tell anybody then.
    for (cudaEvent_t event : all_) static_cast<void>(cudaEventDestroy(event));
  }

  EventClock(const EventClock&) = delete;
  EventClock& operator=(const EventClock&) = delete;

  DeviceGuard enter() const { return DeviceGuard(device_); }

  Instant now(std::uintptr_t stream) {
    if (spare_.empty()) spare_.push_back(create());
    cudaEvent_t event = spare_.back();
    check(cudaEventRecord(event, reinterpret_cast<cudaStream_t>(stream)), "cudaEventRecord");
    spare_.pop_back();
    return event;
  }

  // Nothing while the device has not reached both; on different streams the later one may come first.
  std::optional<double> seconds(Instant from, Instant to) const {
    float milliseconds = 0;
    const cudaError_t status = cudaEventElapsedTime(&milliseconds, from, to);
    if (status == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return std::nullopt;
    }
    check(status, "cudaEventElapsedTime");
    return milliseconds * 1e-3;
  }

  void recycle(Instant event) { spare_.push_back(event); }

  bool is_recording(std::uintptr_t stream) const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t asked = cudaStreamIsCapturing(reinterpret_cast<cudaStream_t>(stream), &status);
    if (asked == cudaErrorStreamCaptureImplicit) {
      // The default stream may not be used while a blocking stream of another thread is recorded.
      static_cast<void>(cudaGetLastError());
      return true;
    }
    check(asked, "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

 private:
  cudaEvent_t create() {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDefault), "cudaEventCreate");
    all_.push_back(event);
    spare_.reserve(all_.size());  // recycling never fails
    return event;
  }

  const int device_;
  std::vector<cudaEvent_t> all_, spare_;
};

}  // namespace

std::unique_ptr<StepTimer> make_event_timer(Counter& counter, int device) {
  return std::make_unique<ClockTimer<EventClock> >(counter, device);
}

}  // namespace flatout::mfu

#endif
