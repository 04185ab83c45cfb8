// cuda_runtime.h: the CUDA runtime without torch: errors, the current device, stream capture, the driver.
#pragma once

#include <cuda_runtime_api.h>

#include <new>

struct CUctx_st;

namespace flatout {

// Throws std::runtime_error that names the call. Clears the error first, so that no later call reports it.
void check_cuda(cudaError_t error, const char* call);

// Lets this thread make calls that would break a capture of another stream, such as cudaEventQuery. Makes a
// context on the current device, like most calls.
class RelaxedCapture {
 public:
  RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Makes `device` current for a scope, with relaxed captures.
//
// The end of the scope restores the driver's context instead of the device. Since CUDA 12.0, cudaSetDevice
// creates a context on a device that has none. A context takes hundreds of megabytes of device memory.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  // For destructors. Ignores errors, because the driver may be gone at the end of the process.
  DeviceGuard(int device, std::nothrow_t) noexcept;
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  class Switch {
   public:
    explicit Switch(int device) noexcept;
    ~Switch();
    cudaError_t error() const { return error_; }

   private:
    CUctx_st* previous_ = nullptr;  // null: the thread had no context
    bool has_switched_ = false;
    cudaError_t error_ = cudaSuccess;
  };

  // The order matters. Without a context, a change of the capture mode would create a context on the first
  // device.
  const Switch switch_;
  const RelaxedCapture relaxed_;
};

// True if work on the stream is recorded into a graph instead of run. True also for the default stream while
// a blocking stream is captured, because no work may be queued on it then.
bool is_capturing(cudaStream_t stream);

// True if the device has done all work that the event follows.
bool is_reached(cudaEvent_t event);

// True if the driver runs this library's kernels. Drivers of one major version are compatible with each
// other, but kernel arguments of more than 4 KiB require 12.1.
bool driver_is_new_enough();

}  // namespace flatout
