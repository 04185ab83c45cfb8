// cuda_runtime.cpp: errors, the current device, stream capture, the driver.
#include "core/cuda_runtime.h"

#include <cuda.h>

#include <stdexcept>
#include <string>

#include "core/cuda_versions.h"

namespace flatout {
namespace {

// Functions of the driver, which this library does not link.
class Contexts {
 public:
  static const Contexts& get() noexcept {
    static const Contexts contexts;
    return contexts;
  }

  // Returns -1 if the thread has no context.
  int device() const {
    CUdevice device = -1;
    return get_device_ != nullptr && get_device_(&device) == CUDA_SUCCESS ? device : -1;
  }
  CUcontext current() const {
    CUcontext context = nullptr;
    return get_current_ != nullptr && get_current_(&context) == CUDA_SUCCESS ? context : nullptr;
  }
  void make_current(CUcontext context) const {
    if (set_current_ != nullptr) set_current_(context);
  }

 private:
  Contexts() noexcept {
    find("cuCtxGetDevice", get_device_);
    find("cuCtxGetCurrent", get_current_);
    find("cuCtxSetCurrent", set_current_);
  }

  template <class Function>
  static void find(const char* name, Function*& function) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    constexpr unsigned kSince = 4000;  // version of CUDA that has all three
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &found, kSince, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
    if (error == cudaSuccess && result == cudaDriverEntryPointSuccess)
      function = reinterpret_cast<Function*>(found);
  }

  decltype(cuCtxGetDevice)* get_device_ = nullptr;
  decltype(cuCtxGetCurrent)* get_current_ = nullptr;
  decltype(cuCtxSetCurrent)* set_current_ = nullptr;
};

}  // namespace

void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw std::runtime_error(std::string("flatout: ") + call + " failed: " + cudaGetErrorString(error));
}

DeviceGuard::DeviceGuard(int device) : switch_(device) { check_cuda(switch_.error(), "cudaSetDevice"); }

DeviceGuard::DeviceGuard(int device, std::nothrow_t) noexcept : switch_(device) {
  if (switch_.error() != cudaSuccess) static_cast<void>(cudaGetLastError());
}

DeviceGuard::Switch::Switch(int device) noexcept {
  const Contexts& contexts = Contexts::get();
  if (contexts.device() == device) return;
  previous_ = contexts.current();
  error_ = cudaSetDevice(device);
  has_switched_ = error_ == cudaSuccess;
}

DeviceGuard::Switch::~Switch() {
  if (has_switched_) Contexts::get().make_current(previous_);
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error == cudaErrorStreamCaptureImplicit) {
    static_cast<void>(cudaGetLastError());
    return true;
  }
  check_cuda(error, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

bool is_reached(cudaEvent_t event) {
  const cudaError_t error = cudaEventQuery(event);
  if (error == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  check_cuda(error, "cudaEventQuery");
  return true;
}

bool driver_is_new_enough() {
  const auto [driver, runtime] = cuda_versions();
  return runtime != 0 && driver >= needed_driver(runtime);
}

}  // namespace flatout
