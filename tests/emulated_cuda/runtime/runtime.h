// runtime.h: state of the emulated runtime, and the frame of each of its calls.
//
// One thread, the executor, does the work of the devices. The executor runs one operation at a time, from
// streams in random order.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "memory.h"

namespace emulated {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

struct Completion {
  bool done = false;
  Clock::time_point at{};  // on the device's clock, which other work on this machine does not delay
};
using CompletionPtr = std::shared_ptr<Completion>;

// Work of a kernel, a copy or a host function.
struct Work {
  std::string name;
  std::function<void()> run;
  unsigned devices;                        // devices whose memory the work may access
  std::optional<Clock::duration> lasts{};  // time on the device's clock; none: the real time
};

struct Operation {
  Work work;
  Clock::time_point queued;
  std::vector<CompletionPtr> after;
  CompletionPtr completion;
};

struct Node {
  Work work;
  std::set<std::size_t> after;
};

struct Graph {
  std::vector<Node> nodes;
  unsigned long long id = 0;
};

// A capture of one stream, or of several streams that have joined the capture.
struct Capture {
  Graph graph;
  cudaStreamCaptureMode mode{};
  std::thread::id thread;
  bool is_broken = false;
};
using CapturePtr = std::shared_ptr<Capture>;

struct Stream {
  int device;
  bool is_blocking;  // this stream and the legacy stream wait for each other
  bool is_legacy;
  int priority;
  unsigned id;
  std::deque<Operation> queue{};
  CompletionPtr tail{};  // of the last operation
  CapturePtr capture{};  // null: the stream does not capture
  bool is_origin = false;
  std::set<std::size_t> frontier{};  // nodes on which the next node depends
  bool is_destroyed = false;         // forgotten after its last operation
};

struct Event {
  int device;
  unsigned flags;
  CompletionPtr recorded{};
  CapturePtr capture{};  // of the last record; null outside of a capture
  std::set<std::size_t> frontier{};
};

enum class Order { kRandom, kLazy, kEager };

// Settings from the environment, which are read once.
struct Settings {
  Order order =
      Order::kRandom;       // EMULATED_CUDA_ORDER: random; lazy: only while the host waits; eager: at once
  unsigned seed = 1;        // EMULATED_CUDA_SEED
  unsigned delay_us = 100;  // EMULATED_CUDA_DELAY_US: mean delay of an operation in random order
  int devices = 2;          // EMULATED_CUDA_DEVICES
  int driver = 13000;       // EMULATED_CUDA_DRIVER: version of the driver
  int runtime = CUDART_VERSION;               // EMULATED_CUDA_RUNTIME: reported version of the runtime
  std::size_t memory = std::size_t{4} << 30;  // bytes of each device
  std::string pci_bus_id;  // EMULATED_CUDA_PCI_BUS_ID: ID of all devices; empty: a different ID for each
  bool prints = false;     // EMULATED_CUDA_PRINT: each operation to stderr
  static Settings read();
};

class Runtime {
 public:
  static Runtime& get();  // never destroyed: streams may be used until the end of the process

  const Settings settings = Settings::read();
  Memory memory;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::vector<bool> has_context;
  unsigned next_stream = 1;
  unsigned long long next_graph = 1;
  cudaError_t broken_context = cudaSuccess;  // a sticky error, which every later call returns

  // Returns the stream of a handle. Ends the process if the stream was destroyed.
  Stream* stream_of(cudaStream_t handle);
  Event* event_of(cudaEvent_t handle);
  void forget(Stream* stream);

  // Appends work to a stream, or a node to the graph that the stream captures. Outside of a capture, the work
  // also waits for `after`.
  cudaError_t enqueue(Stream* stream, Work work, std::vector<CompletionPtr> after = {});

  // Waits for operations of the devices. The predicate is called with the lock held.
  void wait(Lock& lock, const std::function<bool()>& is_done);
  // Waits for a moment, because the host polls.
  void wait_shortly(Lock& lock);
  bool is_idle(int device) const;
  std::vector<CompletionPtr> unfinished_before(const Stream* stream) const;

  // Returns the error of a call that some captures prohibit, else cudaSuccess. See "Prohibited and Unhandled
  // Operations" of the guide.
  cudaError_t refuse_in_capture();
  bool blocking_stream_captures(int device) const;

  unsigned random();

 private:
  friend class Call;
  Runtime();
  void execute();  // the executor's loop
  Stream* next_ready();
  void start();
  void stop();

  std::mutex mutex_;
  std::condition_variable work_, progress_;
  std::minstd_rand random_;
  std::vector<Stream*> legacy_;
  unsigned waiting_ = 0;  // host threads that wait for a device
  bool is_started_ = false, is_stopping_ = false, is_running_ = false;
};

// Returns the device of the calling thread's context. Without a context, returns the device that the thread
// has set last, or 0.
int current_device();
void set_current_device(int device);
// The device of the calling thread's context, or kNoContext.
constexpr int kNoContext = -1;
int context_device();
void set_context_device(int device);
extern thread_local cudaError_t last_error;
extern thread_local cudaStreamCaptureMode capture_mode;

// Frame of a call. Counts the call, injects requested faults, refuses forked children and old drivers, takes
// the lock, and keeps the error for cudaGetLastError.
enum class Needs { kNothing, kDriver, kContext };
cudaError_t call(const char* name, Needs needs, const std::function<cudaError_t(Runtime&, Lock&)>& body);

// Runs the nodes of a graph in a random order that their edges allow.
void run_graph(const Graph& graph);

}  // namespace emulated
