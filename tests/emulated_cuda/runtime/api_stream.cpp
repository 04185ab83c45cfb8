// api_stream.cpp: streams, events and host functions.
//
// Models "Stream Management" and "Event Management" of the CUDA Runtime API.
#include <algorithm>

#include "runtime.h"

using emulated::call;
using emulated::current_device;
using emulated::Event;
using emulated::Lock;
using emulated::Needs;
using emulated::Runtime;
using emulated::Stream;

namespace {

// A call that is not allowed on a capturing stream breaks the capture.
cudaError_t break_capture(Stream* stream) {
  stream->capture->is_broken = true;
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t refuse_wait_for(Runtime& runtime, Stream* stream) {
  if (stream->capture != nullptr) return break_capture(stream);
  if (const cudaError_t refused = runtime.refuse_in_capture()) return refused;
  return stream->is_legacy && runtime.blocking_stream_captures(stream->device)
             ? cudaErrorStreamCaptureImplicit
             : cudaSuccess;
}

// Makes a stream wait for an event that was recorded in a capture. A stream that does not capture joins the
// capture.
cudaError_t join_capture(Stream* stream, const Event* event) {
  if (stream->capture != nullptr && stream->capture != event->capture) return cudaErrorStreamCaptureMerge;
  if (stream->capture == nullptr) {
    if (stream->is_legacy) return cudaErrorStreamCaptureImplicit;
    stream->capture = event->capture;
    stream->frontier.clear();
  }
  stream->frontier.insert(event->frontier.begin(), event->frontier.end());
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    const bool is_blocking = (flags & cudaStreamNonBlocking) == 0;
    int least = 0, greatest = 0;
    cudaDeviceGetStreamPriorityRange(&least, &greatest);
    priority = std::clamp(priority, greatest, least);
    auto* stream = new Stream{current_device(), is_blocking, false, priority, runtime.next_stream++};
    runtime.streams.insert(stream);
    *handle = reinterpret_cast<cudaStream_t>(stream);
    return cudaSuccess;
  });
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    Stream* stream = runtime.stream_of(handle);
    stream->is_destroyed = true;
    if (stream->queue.empty()) runtime.forget(stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    *priority = runtime.stream_of(handle)->priority;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock& lock) {
    Stream* stream = runtime.stream_of(handle);
    if (const cudaError_t refused = refuse_wait_for(runtime, stream)) return refused;
    runtime.wait(lock, [before = runtime.unfinished_before(stream)] {
      return std::all_of(before.begin(), before.end(), [](const auto& one) { return one->done; });
    });
    return runtime.broken_context;
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock& lock) {
    Stream* stream = runtime.stream_of(handle);
    if (const cudaError_t refused = refuse_wait_for(runtime, stream)) return refused;
    if (!runtime.unfinished_before(stream).empty()) runtime.wait_shortly(lock);
    return runtime.unfinished_before(stream).empty() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    Stream* stream = runtime.stream_of(handle);
    const Event* event = runtime.event_of(event_handle);
    if (event->capture != nullptr) return join_capture(stream, event);
    if (event->recorded == nullptr) return cudaSuccess;
    if (stream->capture != nullptr) {
      if (event->recorded->done) return cudaSuccess;
      stream->capture->is_broken = true;
      return cudaErrorStreamCaptureIsolation;
    }
    return runtime.enqueue(stream, {"wait", nullptr, 0}, {event->recorded});
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    return runtime.enqueue(runtime.stream_of(handle), {"host function", [=] { function(argument); }, 0});
  });
}

// ---- events
// --------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    auto* event = new Event{current_device(), flags};
    runtime.events.insert(event);
    *handle = reinterpret_cast<cudaEvent_t>(event);
    return cudaSuccess;
  });
}
cudaError_t cudaEventCreate(cudaEvent_t* handle) {
  return cudaEventCreateWithFlags(handle, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    Event* event = runtime.event_of(handle);
    runtime.events.erase(event);
    delete event;
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    Event* event = runtime.event_of(handle);
    Stream* stream = runtime.stream_of(stream_handle);
    if (event->device != stream->device) return cudaErrorInvalidResourceHandle;
    const bool is_node = stream->capture != nullptr && (flags & cudaEventRecordExternal) != 0;
    if (stream->capture != nullptr && !is_node) {
      if (stream->capture->is_broken) return cudaErrorStreamCaptureInvalidated;
      event->capture = stream->capture;
      event->frontier = stream->frontier;
      return cudaSuccess;
    }
    event->capture = nullptr;
    if (const cudaError_t error = runtime.enqueue(stream, {"event", nullptr, 0})) return error;
    if (!is_node) event->recorded = stream->tail;
    return cudaSuccess;
  });
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return cudaEventRecordWithFlags(handle, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock& lock) {
    const Event* event = runtime.event_of(handle);
    if (event->capture != nullptr) return cudaErrorCapturedEvent;
    if (const cudaError_t refused = runtime.refuse_in_capture()) return refused;
    if (event->recorded == nullptr || event->recorded->done) return cudaSuccess;
    const auto recorded = event->recorded;
    runtime.wait_shortly(lock);
    return recorded->done ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock& lock) {
    const Event* event = runtime.event_of(handle);
    if (event->capture != nullptr) return cudaErrorCapturedEvent;
    if (const cudaError_t refused = runtime.refuse_in_capture()) return refused;
    if (event->recorded != nullptr)
      runtime.wait(lock, [recorded = event->recorded] { return recorded->done; });
    return runtime.broken_context;
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin_handle, cudaEvent_t end_handle) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock& lock) {
    const Event *begin = runtime.event_of(begin_handle), *end = runtime.event_of(end_handle);
    if (begin->device != end->device || begin->recorded == nullptr || end->recorded == nullptr)
      return cudaErrorInvalidResourceHandle;
    if (((begin->flags | end->flags) & cudaEventDisableTiming) != 0) return cudaErrorInvalidResourceHandle;
    const auto from = begin->recorded, to = end->recorded;
    if (!from->done || !to->done) runtime.wait_shortly(lock);
    if (!from->done || !to->done) return cudaErrorNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(to->at - from->at).count();
    return cudaSuccess;
  });
}
}
