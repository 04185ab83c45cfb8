// api_graph.cpp: stream capture and graphs.
//
// Models "CUDA Graphs: Stream Capture" of the programming guide: cross-stream dependencies, invalidation, and
// the calls that a capture prohibits.
#include <algorithm>

#include "runtime.h"

using emulated::call;
using emulated::Capture;
using emulated::CapturePtr;
using emulated::Graph;
using emulated::Lock;
using emulated::Needs;
using emulated::Runtime;
using emulated::Stream;

namespace {

using Executable = std::shared_ptr<const Graph>;

cudaStreamCaptureStatus status_of(const Stream* stream) {
  if (stream->capture == nullptr) return cudaStreamCaptureStatusNone;
  return stream->capture->is_broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

// True if the origin of a capture depends on all nodes of other streams.
bool is_joined(const Capture& capture, const std::set<std::size_t>& frontier,
               const std::vector<Stream*>& joined) {
  std::set<std::size_t> reached;
  std::vector<std::size_t> open(frontier.begin(), frontier.end());
  while (!open.empty()) {
    const std::size_t node = open.back();
    open.pop_back();
    if (!reached.insert(node).second) continue;
    const auto& after = capture.graph.nodes[node].after;
    open.insert(open.end(), after.begin(), after.end());
  }
  return std::all_of(joined.begin(), joined.end(), [&](const Stream* stream) {
    return std::includes(reached.begin(), reached.end(), stream->frontier.begin(), stream->frontier.end());
  });
}

void leave_capture(Stream* stream) {
  stream->capture = nullptr;
  stream->is_origin = false;
  stream->frontier.clear();
}

}  // namespace

extern "C" {

// The mode belongs to the thread. The runtime still creates a context on the current device (libcudart 13.0).
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return call(__func__, Needs::kContext, [&](Runtime&, Lock&) {
    std::swap(*mode, emulated::capture_mode);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    Stream* stream = runtime.stream_of(handle);
    if (stream->is_legacy) return cudaErrorStreamCaptureUnsupported;
    if (stream->capture != nullptr) return cudaErrorIllegalState;
    stream->capture = std::make_shared<Capture>();
    stream->capture->graph.id = runtime.next_graph++;
    stream->capture->mode = mode;
    stream->capture->thread = std::this_thread::get_id();
    stream->is_origin = true;
    stream->frontier.clear();
    return cudaSuccess;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    *graph = nullptr;
    Stream* origin = runtime.stream_of(handle);
    const CapturePtr capture = origin->capture;
    if (capture == nullptr) return cudaErrorIllegalState;
    if (!origin->is_origin) return cudaErrorStreamCaptureUnmatched;
    if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
      return cudaErrorStreamCaptureWrongThread;
    std::vector<Stream*> joined;
    std::copy_if(runtime.streams.begin(), runtime.streams.end(), std::back_inserter(joined),
                 [&](const Stream* stream) { return stream->capture == capture; });
    const bool joins = is_joined(*capture, origin->frontier, joined);
    std::for_each(joined.begin(), joined.end(), leave_capture);
    if (capture->is_broken) return cudaErrorStreamCaptureInvalidated;
    if (!joins) return cudaErrorStreamCaptureUnjoined;
    *graph = reinterpret_cast<cudaGraph_t>(new Graph(capture->graph));
    return cudaSuccess;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    const Stream* stream = runtime.stream_of(handle);
    if (stream->is_legacy && runtime.blocking_stream_captures(stream->device))
      return cudaErrorStreamCaptureImplicit;
    *status = status_of(stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     std::size_t* count) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    const Stream* stream = runtime.stream_of(handle);
    *status = status_of(stream);
    if (nodes != nullptr) *nodes = nullptr;
    if (edges != nullptr) *edges = nullptr;
    if (count != nullptr) *count = 0;
    if (stream->capture == nullptr) return cudaSuccess;
    if (id != nullptr) *id = stream->capture->graph.id;
    if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(&stream->capture->graph);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long) {
  return call(__func__, Needs::kContext, [&](Runtime&, Lock&) {
    auto* copy = new Executable(std::make_shared<const Graph>(*reinterpret_cast<Graph*>(graph)));
    *executable = reinterpret_cast<cudaGraphExec_t>(copy);
    return cudaSuccess;
  });
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    const Executable graph = *reinterpret_cast<Executable*>(executable);
    unsigned devices = 0;
    for (const emulated::Node& node : graph->nodes) devices |= node.work.devices;
    return runtime.enqueue(runtime.stream_of(handle), {"graph", [graph] { run_graph(*graph); }, devices});
  });
}

// Objects of a graph may call the runtime when they are freed, so a graph is deleted without the runtime's
// lock.
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Executable*>(executable);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, std::size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->nodes.size();
  return cudaSuccess;
}

// torch attaches the state of random numbers to a graph as user objects. torch also keeps this state alive
// itself.
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void*, cudaHostFn_t, unsigned, unsigned) {
  *object = nullptr;
  return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
  return cudaSuccess;
}
}
