// cuda_api.cpp: wrappers of the CUDA runtime that turn error codes into exceptions.
#include "prefetch/cuda_api.h"

#include <stdexcept>

#ifdef FLATOUT_WITH_CUDA
#include <algorithm>
#include <array>
#include <cctype>
#include <string>

#include "core/cuda_runtime.h"
#include "prefetch/affinity.h"

namespace flatout::prefetch::cuda {
namespace {

// torch passes its handles as integers. NOLINTBEGIN(performance-no-int-to-ptr)
cudaStream_t as_stream(Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t as_event(EventHandle event) { return reinterpret_cast<cudaEvent_t>(event); }
// NOLINTEND(performance-no-int-to-ptr)

// Returns the ID in lower case, as Linux names devices, or an empty string if the ID is unknown.
std::string pci_bus_id(int device) {
  std::array<char, 32> text{};
  if (cudaDeviceGetPCIBusId(text.data(), text.size(), device) != cudaSuccess) cudaGetLastError();
  std::string id = text.data();
  std::transform(id.begin(), id.end(), id.begin(), [](unsigned char c) { return std::tolower(c); });
  return id;
}

}  // namespace

bool usable() noexcept {
  int devices = 0;
  const bool found = driver_is_new_enough() && cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
  cudaGetLastError();
  return found;
}

void enter_thread(int device) {
  check_cuda(cudaSetDevice(device), "cudaSetDevice");  // first, because other calls create a context
  thread_local bool has_entered = false;
  if (!has_entered) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    bind_thread_near(pci_bus_id(device));
    has_entered = true;
  }
}

Stream create_stream(int device) {
  const DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  const int highest = -100;  // CUDA clamps the number
  check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "cudaStreamCreate");
  return reinterpret_cast<Stream>(stream);
}

void* allocate_pinned(std::size_t bytes, int device) {
  const DeviceGuard guard(device);
  void* data = nullptr;
  check_cuda(cudaHostAlloc(&data, bytes, cudaHostAllocPortable), "cudaHostAlloc");
  return data;
}

void free_pinned(void* data, int device) noexcept {
  const DeviceGuard guard(device, std::nothrow);
  if (cudaFreeHost(data) != cudaSuccess) cudaGetLastError();
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
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, as_stream(stream)), "cudaMemcpyAsync");
}

void wait_event(Stream stream, EventHandle event) {
  check_cuda(cudaStreamWaitEvent(as_stream(stream), as_event(event), 0), "cudaStreamWaitEvent");
}

Event::Event(int device) : device_(device) {
  const DeviceGuard guard(device);
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
             "cudaEventCreateWithFlags");
  handle_ = reinterpret_cast<EventHandle>(event);
}

Event::~Event() {
  if (fork_guard_.forked()) return;  // a forked child must not call CUDA
  const DeviceGuard guard(device_, std::nothrow);
  if (cudaEventDestroy(as_event(handle_)) != cudaSuccess) cudaGetLastError();
}

void Event::record(Stream stream) {
  const DeviceGuard guard(device_);
  check_cuda(cudaEventRecord(as_event(handle_), as_stream(stream)), "cudaEventRecord");
}

bool Event::done() const {
  const DeviceGuard guard(device_);
  return is_reached(as_event(handle_));
}

void Event::synchronize() const {
  const DeviceGuard guard(device_);
  check_cuda(cudaEventSynchronize(as_event(handle_)), "cudaEventSynchronize");
}

void Event::block(Stream stream) const {
  // Stream 0, torch's default stream, belongs to the current device.
  const DeviceGuard guard(device_);
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

Event::Event(int device) : device_(device) { missing(); }
Event::~Event() = default;
void Event::record(Stream) { missing(); }
bool Event::done() const { missing(); }
void Event::synchronize() const { missing(); }
void Event::block(Stream) const { missing(); }

}  // namespace flatout::prefetch::cuda

#endif
