// api_memory.cpp: allocation, copies and memsets.
//
// Models "Memory Management" and "Stream Ordered Memory Allocator" of the CUDA Runtime API, and its page "API
// synchronization behavior". A pageable source is read before the call returns. A pinned source is read when
// the copy runs.
#include <cstring>
#include <vector>

#include "runtime.h"

using emulated::Allocation;
using emulated::bit_of;
using emulated::call;
using emulated::current_device;
using emulated::kAllDevices;
using emulated::Kind;
using emulated::Lock;
using emulated::Needs;
using emulated::Runtime;
using emulated::Stream;

namespace {

cudaError_t allocate(const char* name, Kind kind, void** pointer, std::size_t bytes) {
  return call(name, Needs::kContext, [&](Runtime& runtime, Lock&) {
    *pointer = nullptr;
    if (const cudaError_t refused = runtime.refuse_in_capture()) return refused;
    if (bytes == 0) return cudaSuccess;
    if (kind == Kind::kDevice && runtime.memory.used(current_device()) + bytes > runtime.settings.memory)
      return cudaErrorMemoryAllocation;
    *pointer = runtime.memory.allocate(kind, current_device(), bytes);
    return *pointer == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
  });
}

// Waits for all devices and frees. CUDA does not promise the wait, but much code relies on it. Later accesses
// always fault.
cudaError_t release(const char* name, void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  return call(name, Needs::kContext, [&](Runtime& runtime, Lock& lock) {
    if (const cudaError_t refused = runtime.refuse_in_capture()) return refused;
    runtime.wait(lock, [&runtime] {
      for (int device = 0; device < runtime.settings.devices; ++device)
        if (!runtime.is_idle(device)) return false;
      return true;
    });
    runtime.memory.release(pointer);
    return cudaSuccess;
  });
}

bool is_known(const Runtime& runtime, const void* pointer) { return runtime.memory.find(pointer) != nullptr; }

bool is_on_device(const Runtime& runtime, const void* pointer) {
  const Allocation* allocation = runtime.memory.find(pointer);
  return allocation != nullptr && allocation->kind == Kind::kDevice;
}

const char* name_of_copy(const Runtime& runtime, const void* to, const void* from) {
  if (!is_on_device(runtime, to)) return "copy to host";
  return is_on_device(runtime, from) ? "copy on device" : "copy to device";
}

cudaError_t copy(const char* name, void* to, const void* from, std::size_t bytes, cudaStream_t handle,
                 bool is_async) {
  return call(name, Needs::kContext, [&](Runtime& runtime, Lock& lock) {
    if (bytes == 0) return cudaSuccess;
    Stream* stream = runtime.stream_of(handle);
    if (!is_async)
      if (const cudaError_t refused = runtime.refuse_in_capture()) return refused;
    runtime.memory.check_access("a copy leaves its target", to, bytes);
    runtime.memory.check_access("a copy leaves its source", from, bytes);
    std::function<void()> run = [=] { std::memmove(to, from, bytes); };
    const bool is_captured = stream->capture != nullptr;
    if (!is_captured && !is_known(runtime, from)) {
      const auto* begin = static_cast<const char*>(from);
      auto staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
      run = [=] { std::memcpy(to, staged->data(), bytes); };
    }
    const char* what = name_of_copy(runtime, to, from);
    if (const cudaError_t error = runtime.enqueue(stream, {what, std::move(run), kAllDevices})) return error;
    if (!is_captured && (!is_async || !is_known(runtime, to)))
      runtime.wait(lock, [copied = stream->tail] { return copied->done; });
    return runtime.broken_context;
  });
}

cudaError_t fill(const char* name, void* pointer, int value, std::size_t bytes, cudaStream_t handle) {
  return call(name, Needs::kContext, [&](Runtime& runtime, Lock&) {
    if (bytes == 0) return cudaSuccess;
    runtime.memory.check_access("a memset leaves its target", pointer, bytes);
    Stream* stream = runtime.stream_of(handle);
    return runtime.enqueue(stream,
                           {"memset", [=] { std::memset(pointer, value, bytes); }, bit_of(stream->device)});
  });
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  return allocate(__func__, Kind::kDevice, pointer, bytes);
}
cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  return allocate(__func__, Kind::kPinned, pointer, bytes);
}
cudaError_t cudaMallocHost(void** pointer, std::size_t bytes) {
  return allocate(__func__, Kind::kPinned, pointer, bytes);
}
cudaError_t cudaFree(void* pointer) { return release(__func__, pointer); }
cudaError_t cudaFreeHost(void* pointer) { return release(__func__, pointer); }

cudaError_t cudaHostRegister(void* pointer, std::size_t bytes, unsigned) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    runtime.memory.add_registered(pointer, bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaHostUnregister(void* pointer) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    runtime.memory.remove_registered(pointer);
    return cudaSuccess;
  });
}

// Memory is mapped at once, and unmapped when the stream reaches the free. Another stream that accesses the
// memory later, without a wait, faults.
cudaError_t cudaMallocAsync(void** pointer, std::size_t bytes, cudaStream_t handle) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    const Stream* stream = runtime.stream_of(handle);
    *pointer = nullptr;
    if (stream->capture != nullptr) return cudaErrorNotSupported;
    if (runtime.memory.used(stream->device) + bytes > runtime.settings.memory)
      return cudaErrorMemoryAllocation;
    *pointer = runtime.memory.allocate(Kind::kDevice, stream->device, bytes);
    return *pointer == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
  });
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t handle) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    Stream* stream = runtime.stream_of(handle);
    auto run = [pointer] {
      call("release", Needs::kNothing, [&](Runtime& runtime, Lock&) {
        runtime.memory.release(pointer);
        return cudaSuccess;
      });
    };
    return runtime.enqueue(stream, {"free", run, 0});
  });
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, std::size_t) { return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  std::memset(value, 0, sizeof(std::uint64_t));
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    *total = runtime.settings.memory;
    *free = *total - std::min(*total, runtime.memory.used(current_device()));
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    *attributes = {};
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    if (const Allocation* allocation = runtime.memory.find(pointer)) {
      attributes->type = allocation->kind == Kind::kDevice ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
      attributes->device = allocation->device;
      attributes->devicePointer = const_cast<void*>(pointer);
      if (allocation->kind != Kind::kDevice) attributes->hostPointer = const_cast<void*>(pointer);
    }
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return copy(__func__, to, from, bytes, stream, true);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes,
                                cudaStream_t stream) {
  return copy(__func__, to, from, bytes, stream, true);
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  return copy(__func__, to, from, bytes, nullptr, false);
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind, cudaStream_t handle) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    auto run = [=] {
      for (std::size_t row = 0; row < height; ++row)
        std::memcpy(static_cast<char*>(to) + row * to_pitch,
                    static_cast<const char*>(from) + row * from_pitch, width);
    };
    return runtime.enqueue(runtime.stream_of(handle), {"copy of rows", run, kAllDevices});
  });
}

cudaError_t cudaMemsetAsync(void* pointer, int value, std::size_t bytes, cudaStream_t stream) {
  return fill(__func__, pointer, value, bytes, stream);
}
cudaError_t cudaMemset(void* pointer, int value, std::size_t bytes) {
  return fill(__func__, pointer, value, bytes, nullptr);
}
}
