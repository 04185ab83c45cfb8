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

#include <deque>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

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

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

class EventTimer final : public StepTimer {
 public:
  EventTimer(Counter& counter, int device) : counter_(counter), device_(device) {
    const DeviceGuard guard(device_);
    spare_.push_back(create());  // fails here, not in the first step, where the driver is too old
  }

  ~EventTimer() override {
    // At the interpreter's end the context may be gone already: nothing to tell anybody then.
    for (cudaEvent_t event : all_) static_cast<void>(cudaEventDestroy(event));
  }

  EventTimer(const EventTimer&) = delete;
  EventTimer& operator=(const EventTimer&) = delete;

  Token begin(std::uintptr_t stream) override {
    const DeviceGuard guard(device_);
    const std::scoped_lock lock(mutex_);
    poll_finished();
    const auto handle = reinterpret_cast<cudaStream_t>(stream);
    if (is_capturing(handle)) return kCaptured;
    cudaEvent_t begun = take();
    open_.emplace(++last_token_, begun);
    check(cudaEventRecord(begun, handle), "cudaEventRecord");
    return last_token_;
  }

  void end(Token token, std::uintptr_t stream, std::int64_t samples, double flops) override {
    if (token == kCaptured) return;  // recorded into a graph, not run
    const DeviceGuard guard(device_);
    const std::scoped_lock lock(mutex_);
    const auto begun = open_.find(token);
    if (begun == open_.end()) return;  // reset() came in between
    const Pending step{.begin = begun->second,
                       .end = take(),
                       .samples = samples,
                       .flops = flops,
                       .waited = std::exchange(waited_, 0.0)};
    open_.erase(begun);
    check(cudaEventRecord(step.end, reinterpret_cast<cudaStream_t>(stream)), "cudaEventRecord");
    pending_.push_back(step);
  }

  void drop(Token token) override {
    const std::scoped_lock lock(mutex_);
    const auto begun = open_.find(token);
    if (begun == open_.end()) return;
    give_back(begun->second);
    open_.erase(begun);
  }

  void waited(double seconds) override {
    const std::scoped_lock lock(mutex_);
    waited_ += seconds;
  }

  void poll() override {
    const DeviceGuard guard(device_);
    const std::scoped_lock lock(mutex_);
    poll_finished();
  }

  void reset() override {
    const std::scoped_lock lock(mutex_);
    for (auto& [token, event] : open_) give_back(event);
    open_.clear();
    for (Pending& step : pending_) {
      give_back(step.begin);
      give_back(step.end);
    }
    pending_.clear();
    give_back(last_end_);
    waited_ = 0;
  }

 private:
  struct Pending {
    cudaEvent_t begin, end;
    std::int64_t samples;
    double flops, waited;
  };

  static constexpr Token kCaptured = -1;

  cudaEvent_t create() {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDefault), "cudaEventCreate");
    all_.push_back(event);
    return event;
  }

  // The ring grows to as many steps as the host ever was ahead of the device.
  cudaEvent_t take() {
    if (spare_.empty()) return create();
    cudaEvent_t event = spare_.back();
    spare_.pop_back();
    return event;
  }

  void give_back(cudaEvent_t& event) {
    if (event != nullptr) spare_.push_back(std::exchange(event, nullptr));
  }

  void poll_finished() {
    while (!pending_.empty()) {
      Pending step = pending_.front();
      const std::optional<double> duration = seconds_between(step.begin, step.end);
      const std::optional<double> gap =
          last_end_ == nullptr ? kUnknown : seconds_between(last_end_, step.begin);
      if (!duration || !gap) return;
      pending_.pop_front();
      counter_.add(*duration, *gap, step.waited, step.samples, step.flops);
      give_back(last_end_);
      last_end_ = step.end;
      give_back(step.begin);
    }
  }

  // Nothing while the device has not reached both; on different streams the later one may come first.
  static std::optional<double> seconds_between(cudaEvent_t from, cudaEvent_t to) {
    float milliseconds = 0;
    const cudaError_t status = cudaEventElapsedTime(&milliseconds, from, to);
    if (status == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return std::nullopt;
    }
    check(status, "cudaEventElapsedTime");
    return milliseconds * 1e-3;
  }

  Counter& counter_;
  const int device_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> all_, spare_;
  std::unordered_map<Token, cudaEvent_t> open_;
  Token last_token_ = 0;
  std::deque<Pending> pending_;
  cudaEvent_t last_end_ = nullptr;
  double waited_ = 0;
};

}  // namespace

std::unique_ptr<StepTimer> make_event_timer(Counter& counter, int device) {
  return std::make_unique<EventTimer>(counter, device);
}

}  // namespace flatout::mfu

#endif
