// cuda_api.cpp: thin wrappers over the static CUDA runtime that turn error codes into exceptions.
#include "prefetch/cuda_api.h"

#include <stdexcept>
#include <string>

#ifdef FLATOUT_WITH_CUDA
#include <cuda_runtime_api.h>

namespace flatout::prefetch::cuda {
namespace {

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // clears the error, so that the next call is not blamed for this one
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
  }
}

// Most calls on one thread break a CUDA graph that another thread, or another stream, captures: not in this
// scope.
class RelaxedCapture {
 public:
  RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    changed_ = device != previous_;
    if (changed_) check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  const RelaxedCapture relaxed_;
  int previous_ = 0;
  bool changed_ = false;
};

// torch hands its handles out as integers.
// NOLINTBEGIN(performance-no-int-to-ptr)
cudaStream_t as_stream(Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t as_event(EventHandle event) { return reinterpret_cast<cudaEvent_t>(event); }
// NOLINTEND(performance-no-int-to-ptr)

}  // namespace

bool usable() noexcept {
  // Minor-version compatibility: a driver of the runtime's major version, or a newer one, serves.
  int driver = 0, runtime = 0, devices = 0;
  const bool found = cudaDriverGetVersion(&driver) == cudaSuccess &&
                     cudaRuntimeGetVersion(&runtime) == cudaSuccess && driver / 1000 >= runtime / 1000 &&
                     cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
  cudaGetLastError();
  return found;
}

void enter_thread(int device) {
  thread_local bool relaxed = false;
  if (!relaxed) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    relaxed = true;
  }
  check(cudaSetDevice(device), "cudaSetDevice");
}

Stream create_stream(int device) {
  const DeviceScope scope(device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return reinterpret_cast<Stream>(stream);
}

void* allocate_pinned(std::size_t bytes, int device) {
  const DeviceScope scope(device);
  void* data = nullptr;
  check(cudaHostAlloc(&data, bytes, cudaHostAllocPortable), "cudaHostAlloc");
  return data;
}

void free_pinned(void* data, int device) noexcept {
  try {
    const DeviceScope scope(device);
    check(cudaFreeHost(data), "cudaFreeHost");
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // At interpreter exit the driver may be gone already, and the memory with it.
  }
}

bool is_pinned(const void* data) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return attributes.type == cudaMemoryTypeHost;
}

void copy_to_device_async(void* to, const void* from, std::size_t bytes, Stream stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, as_stream(stream)), "cudaMemcpyAsync");
}

void wait_event(Stream stream, EventHandle event) {
  check(cudaStreamWaitEvent(as_stream(stream), as_event(event), 0), "cudaStreamWaitEvent");
}

Event::Event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
        "cudaEventCreateWithFlags");
  handle_ = reinterpret_cast<EventHandle>(event);
}

Event::~Event() {
  if (guard_.forked()) return;  // a forked child must not call CUDA
  const RelaxedCapture relaxed;
  if (cudaEventDestroy(as_event(handle_)) != cudaSuccess) cudaGetLastError();
}

void Event::record(Stream stream) {
  check(cudaEventRecord(as_event(handle_), as_stream(stream)), "cudaEventRecord");
}

bool Event::done() const {
  const RelaxedCapture relaxed;
  const cudaError_t status = cudaEventQuery(as_event(handle_));
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check(status, "cudaEventQuery");
  return true;
}

void Event::synchronize() const {
  const RelaxedCapture relaxed;
  check(cudaEventSynchronize(as_event(handle_)), "cudaEventSynchronize");
}

void Event::block(Stream stream, int device) const {
  // Stream 0, torch's default, means "of the current device": that must be the stream's own.
  const DeviceScope scope(device);
  wait_event(stream, handle_);
}

}  // namespace flatout::prefetch::cuda

#else

namespace flatout::prefetch::cuda {
namespace {

[[noreturn]] void missing() { throw std::runtime_error("this build of flatout has no CUDA support"); }

}  // namespace

bool usable() noexcept { return false; }
void enter_thread(int) { missing(); }
Stream create_stream(int) { missing(); }
void* allocate_pinned(std::size_t, int) { missing(); }
void free_pinned(void*, int) noexcept {}
bool is_pinned(const void*) { return false; }
void copy_to_device_async(void*, const void*, std::size_t, Stream) { missing(); }
void wait_event(Stream, EventHandle) { missing(); }

Event::Event() { missing(); }
Event::~Event() = default;
void Event::record(Stream) { missing(); }
bool Event::done() const { missing(); }
void Event::synchronize() const { missing(); }
void Event::block(Stream, int) const { missing(); }

}  // namespace flatout::prefetch::cuda

#endif
