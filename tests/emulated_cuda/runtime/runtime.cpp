#include "runtime.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "faults.h"

namespace emulated {
namespace {

thread_local int device_of_thread = 0, context_of_thread = kNoContext;
thread_local bool is_executor = false;
const pid_t process = getpid();

[[noreturn]] void end_process(const char* what) {
  std::fprintf(stderr, "emulated CUDA: %s\n", what);
  std::abort();
}

const char* setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

// Names the address of a bad access before the process ends.
void describe_bad_access(int number, siginfo_t* info, void*) {
  std::fprintf(stderr, "emulated CUDA: bad access by %s\n",
               is_executor ? "the device" : "the host or a kernel");
  if (info->si_code == SI_KERNEL) {  // x86 names no address
    std::fprintf(stderr, "emulated CUDA: a misaligned vector, or an address that cannot be\n");
  } else {
    Runtime::get().memory.describe(info->si_addr);
  }
  signal(number, SIG_DFL);  // the access is repeated
}

}  // namespace

thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

int current_device() { return context_of_thread == kNoContext ? device_of_thread : context_of_thread; }
void set_current_device(int device) { device_of_thread = context_of_thread = device; }
int context_device() { return context_of_thread; }
void set_context_device(int device) { context_of_thread = device; }

Settings Settings::read() {
  Settings settings;
  const std::string order = setting("EMULATED_CUDA_ORDER", "random");
  if (order != "random" && order != "lazy" && order != "eager") end_process("EMULATED_CUDA_ORDER is unknown");
  settings.order = order == "lazy" ? Order::kLazy : order == "eager" ? Order::kEager : Order::kRandom;
  settings.seed = static_cast<unsigned>(std::atoi(setting("EMULATED_CUDA_SEED", "1")));
  settings.delay_us = static_cast<unsigned>(std::atoi(setting("EMULATED_CUDA_DELAY_US", "100")));
  settings.devices = std::atoi(setting("EMULATED_CUDA_DEVICES", "2"));
  settings.driver = std::atoi(setting("EMULATED_CUDA_DRIVER", "13000"));
  settings.runtime = std::atoi(setting("EMULATED_CUDA_RUNTIME", std::to_string(CUDART_VERSION).c_str()));
  settings.pci_bus_id = setting("EMULATED_CUDA_PCI_BUS_ID", "");
  settings.prints = std::getenv("EMULATED_CUDA_PRINT") != nullptr;
  return settings;
}

Runtime& Runtime::get() {
  static auto& runtime = *new Runtime;
  return runtime;
}

Runtime::Runtime() : has_context(static_cast<std::size_t>(settings.devices)), random_(settings.seed) {
  for (int device = 0; device < settings.devices; ++device) {
    legacy_.push_back(new Stream{device, true, true, 0, next_stream++});
    streams.insert(legacy_.back());
  }
  struct sigaction action{};
  action.sa_sigaction = describe_bad_access;
  action.sa_flags = SA_SIGINFO;
  if (std::getenv("ASAN_OPTIONS") == nullptr) sigaction(SIGSEGV, &action, nullptr);
}

unsigned Runtime::random() { return static_cast<unsigned>(random_()); }

// ---- streams
// -------------------------------------------------------------------------------------------------------

Stream* Runtime::stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy)
    return legacy_.at(static_cast<std::size_t>(current_device()));
  auto* stream = reinterpret_cast<Stream*>(handle);
  if (streams.count(stream) == 0 || stream->is_destroyed) end_process("a stream is unknown or was destroyed");
  return stream;
}

void Runtime::forget(Stream* stream) {
  streams.erase(stream);
  delete stream;
}

Event* Runtime::event_of(cudaEvent_t handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  if (events.count(event) == 0) end_process("an event is unknown or was destroyed");
  return event;
}

// "Stream Synchronization Behavior": the legacy default stream and all blocking streams wait for each other.
std::vector<CompletionPtr> Runtime::unfinished_before(const Stream* stream) const {
  std::vector<CompletionPtr> before;
  for (const Stream* other : streams) {
    const bool waits =
        other == stream || (stream->is_legacy ? other->is_blocking : stream->is_blocking && other->is_legacy);
    if (waits && other->device == stream->device && other->tail != nullptr && !other->tail->done)
      before.push_back(other->tail);
  }
  return before;
}

cudaError_t Runtime::enqueue(Stream* stream, Work work, std::vector<CompletionPtr> after) {
  if (stream->capture != nullptr) {
    if (stream->capture->is_broken) return cudaErrorStreamCaptureInvalidated;
    auto& nodes = stream->capture->graph.nodes;
    nodes.push_back({std::move(work), stream->frontier});
    stream->frontier = {nodes.size() - 1};
    return cudaSuccess;
  }
  if (stream->is_legacy && blocking_stream_captures(stream->device)) return cudaErrorStreamCaptureImplicit;
  start();
  const std::vector<CompletionPtr> before = unfinished_before(stream);
  after.insert(after.end(), before.begin(), before.end());
  Operation operation{std::move(work), Clock::now(), std::move(after), std::make_shared<Completion>()};
  stream->tail = operation.completion;
  stream->queue.push_back(std::move(operation));
  work_.notify_all();
  return cudaSuccess;
}

bool Runtime::is_idle(int device) const {
  return std::all_of(streams.begin(), streams.end(),
                     [&](const Stream* stream) { return stream->device != device || stream->queue.empty(); });
}

// ---- capture
// -------------------------------------------------------------------------------------------------------

bool Runtime::blocking_stream_captures(int device) const {
  return std::any_of(streams.begin(), streams.end(), [&](const Stream* stream) {
    return stream->device == device && stream->is_blocking && stream->capture != nullptr;
  });
}

// The rules of cudaThreadExchangeStreamCaptureMode. A thread that captures must not make unsafe calls, unless
// the capture is relaxed. During a capture in mode "global", other threads in mode "global" must not make
// unsafe calls, either.
cudaError_t Runtime::refuse_in_capture() {
  if (capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (Stream* stream : streams) {
    Capture* capture = stream->capture.get();
    if (capture == nullptr || !stream->is_origin || capture->mode == cudaStreamCaptureModeRelaxed) continue;
    const bool is_own = capture->thread == std::this_thread::get_id();
    const bool are_global =
        capture->mode == cudaStreamCaptureModeGlobal && capture_mode == cudaStreamCaptureModeGlobal;
    if (!is_own && !are_global) continue;
    capture->is_broken = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  return cudaSuccess;
}

void run_graph(const Graph& graph) {
  static auto& random = *new std::minstd_rand(Runtime::get().settings.seed);  // only the executor uses it
  std::vector<bool> done(graph.nodes.size());
  for (std::size_t left = done.size(); left != 0; --left) {
    std::vector<std::size_t> ready;
    for (std::size_t i = 0; i < done.size(); ++i) {
      const auto& after = graph.nodes[i].after;
      if (!done[i] && std::all_of(after.begin(), after.end(), [&](std::size_t node) { return done[node]; }))
        ready.push_back(i);
    }
    const std::size_t next = ready[random() % ready.size()];
    if (graph.nodes[next].work.run) graph.nodes[next].work.run();
    done[next] = true;
  }
}

// ---- the executor
// --------------------------------------------------------------------------------------------------

void Runtime::start() {
  if (is_started_) return;
  is_started_ = true;
  std::thread([this] { execute(); }).detach();
  std::atexit([] { get().stop(); });  // before destructors end objects that operations use
}

void Runtime::stop() {
  if (getpid() != process) return;  // a forked child has no executor
  Lock lock(mutex_);
  is_stopping_ = true;
  progress_.wait(lock, [&] { return !is_running_; });
}

Stream* Runtime::next_ready() {
  std::vector<Stream*> ready;
  for (Stream* stream : streams) {
    if (stream->queue.empty()) continue;
    const auto& after = stream->queue.front().after;
    if (std::all_of(after.begin(), after.end(), [](const CompletionPtr& one) { return one->done; }))
      ready.push_back(stream);
  }
  return ready.empty() ? nullptr : ready[random() % ready.size()];
}

// Returns the time at which an operation begins: it is queued, and all operations that it waits for are done.
static Clock::time_point begin_of(const Operation& operation) {
  Clock::time_point begin = operation.queued;
  for (const CompletionPtr& one : operation.after) begin = std::max(begin, one->at);
  return begin;
}

void Runtime::execute() {
  is_executor = true;
  Lock lock(mutex_);
  for (;;) {
    Stream* stream = next_ready();
    const bool is_waited_for = waiting_ != 0;
    if (stream == nullptr || is_stopping_ || (settings.order == Order::kLazy && !is_waited_for)) {
      memory.open(0);  // only here, because protecting pages takes longer than most operations
      work_.wait(lock);
      continue;
    }
    if (settings.order == Order::kRandom && !is_waited_for && settings.delay_us != 0 && random() % 2 == 0) {
      work_.wait_for(lock, std::chrono::microseconds(random() % (2 * settings.delay_us)));
      if (random() % 2 == 0) continue;  // the host may have queued an operation that comes first
    }
    const Operation& operation = stream->queue.front();  // other threads only append
    if (settings.prints)
      std::fprintf(stderr, "emulated CUDA: stream %u: %s\n", stream->id, operation.work.name.c_str());
    note_operation(stream->id, operation.work.name);
    is_running_ = true;
    memory.open(operation.work.devices);
    lock.unlock();
    const auto begun = Clock::now();
    if (operation.work.run) operation.work.run();
    const auto took = Clock::now() - begun;
    lock.lock();
    is_running_ = false;
    operation.completion->done = true;
    operation.completion->at = begin_of(operation) + operation.work.lasts.value_or(took);
    Operation finished = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (stream->is_destroyed && stream->queue.empty()) forget(stream);
    progress_.notify_all();
    lock.unlock();
    finished = {};  // frees objects of the operation, which may call the runtime
    lock.lock();
  }
}

void Runtime::wait(Lock& lock, const std::function<bool()>& is_done) {
  if (is_executor) end_process("an operation of the device waits for the device");
  ++waiting_;
  work_.notify_all();
  progress_.wait(lock, is_done);
  --waiting_;
}

void Runtime::wait_shortly(Lock& lock) {
  ++waiting_;
  work_.notify_all();
  progress_.wait_for(lock, std::chrono::microseconds(50));
  --waiting_;
}

// ---- calls
// ---------------------------------------------------------------------------------------------------------

class Call {
 public:
  static cudaError_t run(const char* name, Needs needs,
                         const std::function<cudaError_t(Runtime&, Lock&)>& body) {
    if (getpid() != process) {
      std::fprintf(stderr, "emulated CUDA: %s in a forked child\n", name);
      return cudaErrorInitializationError;
    }
    Runtime& runtime = Runtime::get();
    if (const cudaError_t fault = note_call(name)) return fault;
    if (needs == Needs::kNothing) {
      Lock lock(runtime.mutex_);
      return body(runtime, lock);
    }
    if (runtime.settings.driver / 1000 < runtime.settings.runtime / 1000) return cudaErrorInsufficientDriver;
    if (runtime.settings.devices == 0) return cudaErrorNoDevice;
    Lock lock(runtime.mutex_);
    if (runtime.broken_context != cudaSuccess) return runtime.broken_context;
    if (needs == Needs::kContext) {
      set_context_device(current_device());
      runtime.has_context[static_cast<std::size_t>(current_device())] = true;
    }
    return body(runtime, lock);
  }
};

cudaError_t call(const char* name, Needs needs, const std::function<cudaError_t(Runtime&, Lock&)>& body) {
  const cudaError_t error = Call::run(name, needs, body);
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace emulated
