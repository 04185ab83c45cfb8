// api_device.cpp: devices, versions and errors.
//
// Models "Device Management", "Version Management", "Error Handling" and "Interactions with the CUDA Driver
// API" of the CUDA Runtime API, and "Context Management" of the CUDA Driver API. The properties are an
// H100's, except for the memory.
#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string_view>

#include "runtime.h"

using emulated::call;
using emulated::Lock;
using emulated::Needs;
using emulated::Runtime;

namespace {

constexpr int kMultiprocessors = 132;

bool is_device(const Runtime& runtime, int device) {
  return device >= 0 && device < runtime.settings.devices;
}

struct Text {
  cudaError_t error;
  const char *name, *text;
};

constexpr Text kTexts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

const Text* text_of(cudaError_t error) {
  for (const Text& text : kTexts)
    if (text.error == error) return &text;
  return nullptr;
}

}  // namespace

extern "C" {

const char* cudaGetErrorString(cudaError_t error) {
  const Text* text = text_of(error);
  return text == nullptr ? "an error without a text in the emulation" : text->text;
}

const char* cudaGetErrorName(cudaError_t error) {
  const Text* text = text_of(error);
  return text == nullptr ? "unrecognized error code" : text->name;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = emulated::last_error;
  emulated::last_error = Runtime::get().broken_context;  // a sticky error stays
  return error;
}

cudaError_t cudaPeekAtLastError() { return emulated::last_error; }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = Runtime::get().settings.driver;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = Runtime::get().settings.runtime;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  return call(__func__, Needs::kDriver, [&](Runtime& runtime, Lock&) {
    *count = runtime.settings.devices;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDevice(int* device) {
  return call(__func__, Needs::kDriver, [&](Runtime&, Lock&) {
    *device = emulated::current_device();
    return cudaSuccess;
  });
}

// Since CUDA 12.0, also makes the device's context.
cudaError_t cudaSetDevice(int device) {
  return call(__func__, Needs::kDriver, [&](Runtime& runtime, Lock&) {
    if (!is_device(runtime, device)) return cudaErrorInvalidDevice;
    emulated::set_current_device(device);
    runtime.has_context[static_cast<std::size_t>(device)] = true;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call(__func__, Needs::kDriver, [&](Runtime& runtime, Lock&) {
    if (!is_device(runtime, device)) return cudaErrorInvalidDevice;
    cudaDeviceProp& p = *properties;
    p = {};
    std::snprintf(p.name, sizeof p.name, "NVIDIA H100 80GB HBM3");
    p.uuid.bytes[0] = static_cast<char>(device + 1);
    p.major = 9;
    p.multiProcessorCount = kMultiprocessors;
    p.totalGlobalMem = runtime.settings.memory;
    p.warpSize = 32;
    p.maxThreadsPerBlock = 1024;
    p.maxThreadsPerMultiProcessor = 2048;
    p.sharedMemPerBlock = 48 << 10;
    p.sharedMemPerMultiprocessor = 228 << 10;
    p.sharedMemPerBlockOptin = 227 << 10;
    p.regsPerBlock = p.regsPerMultiprocessor = 64 << 10;
    p.l2CacheSize = 50 << 20;
    p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
    p.maxThreadsDim[2] = 64;
    p.maxGridSize[0] = 0x7FFFFFFF;
    p.maxGridSize[1] = p.maxGridSize[2] = 65535;
    p.unifiedAddressing = p.concurrentKernels = 1;
    p.asyncEngineCount = 3;
    p.memoryBusWidth = 5120;
    p.pciBusID = device + 1;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return call(__func__, Needs::kDriver, [&](Runtime& runtime, Lock&) {
    if (!is_device(runtime, device)) return cudaErrorInvalidDevice;
    switch (attribute) {
      case cudaDevAttrComputeCapabilityMajor:
        *value = 9;
        break;
      case cudaDevAttrMultiProcessorCount:
        *value = kMultiprocessors;
        break;
      case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = 48 << 10;
        break;
      case cudaDevAttrWarpSize:
        *value = 32;
        break;
      case cudaDevAttrMaxThreadsPerBlock:
        *value = 1024;
        break;
      case cudaDevAttrClockRate:
        *value = 1'980'000;
        break;
      case cudaDevAttrMemoryClockRate:
        *value = 2'619'000;
        break;
      default:
        *value = 0;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  const std::string& requested = Runtime::get().settings.pci_bus_id;
  const auto size = static_cast<std::size_t>(bytes);
  if (!requested.empty()) {
    std::snprintf(text, size, "%s", requested.c_str());
  } else {
    std::snprintf(text, size, "0000:%02X:00.0", device + 1);
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock& lock) {
    if (const cudaError_t refused = runtime.refuse_in_capture()) return refused;
    const int device = emulated::current_device();
    runtime.wait(lock, [&runtime, device] { return runtime.is_idle(device); });
    return runtime.broken_context;
  });
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// Functions of the driver API for contexts, which torch and flatout call. Only primary contexts exist.
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int* version) {
  *version = Runtime::get().settings.driver;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 0;
  const cudaError_t error = call(__func__, Needs::kDriver, [&](Runtime& runtime, Lock&) {
    if (!is_device(runtime, device)) return cudaErrorInvalidDevice;
    *is_active = runtime.has_context[static_cast<std::size_t>(device)];
    return cudaSuccess;
  });
  return static_cast<CUresult>(error);  // the two kinds of errors have the same numbers
}

CUresult cuCtxGetDevice(CUdevice* device) {
  *device = emulated::context_device();
  return *device == emulated::kNoContext ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

// The handle of a context is its device's index, counted from 1.
CUresult cuCtxGetCurrent(CUcontext* context) {
  const int device = emulated::context_device();
  *context =
      device == emulated::kNoContext ? nullptr : reinterpret_cast<CUcontext>(std::intptr_t{device} + 1);
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  const auto handle = reinterpret_cast<std::intptr_t>(context);
  emulated::set_context_device(handle == 0 ? emulated::kNoContext : static_cast<int>(handle - 1));
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult* found) {
  const std::map<std::string_view, void*> functions = {
      {"cuCtxGetCurrent", reinterpret_cast<void*>(&cuCtxGetCurrent)},
      {"cuCtxGetDevice", reinterpret_cast<void*>(&cuCtxGetDevice)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(&cuCtxSetCurrent)},
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(&cuDevicePrimaryCtxGetState)},
  };
  const auto known = functions.find(symbol);
  *function = known == functions.end() ? nullptr : known->second;
  if (found != nullptr)
    *found = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}
