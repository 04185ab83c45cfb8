// cuda_api.h: the CUDA runtime calls of the prefetcher. In a build without CUDA every call throws.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/fork_guard.h"

namespace flatout::prefetch {

inline constexpr int host_device = -1;

namespace cuda {

using Stream = std::uintptr_t;       // a cudaStream_t: torch's `stream.cuda_stream`
using EventHandle = std::uintptr_t;  // a cudaEvent_t: torch's `event.cuda_event`

// True if the build has CUDA, the driver is new enough for its static runtime, and there is a device.
bool usable() noexcept;

// Must be the first call of each thread of the prefetcher. Makes `device` current, and binds the thread to
// CPUs of its NUMA node. Later calls of the thread do not break a CUDA graph that the user captures.
void enter_thread(int device);
// Creates a non-blocking stream of the highest priority, which lives until the process ends. torch's pool
// gives each of its 32 streams to several callers, whose work could delay the copies.
Stream create_stream(int device);

// Pins memory in the context of `device`. A context on another device would take memory of that device.
void* allocate_pinned(std::size_t bytes, int device);
void free_pinned(void* data, int device) noexcept;
bool is_pinned(const void* data);

void copy_to_device_async(void* to, const void* from, std::size_t bytes, Stream stream);
void wait_event(Stream stream, EventHandle event);

// An event of a device, without timing. A thread that waits for it sleeps instead of spinning.
class Event {
 public:
  explicit Event(int device);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(Stream stream);
  bool done() const;
  void synchronize() const;
  // Makes later work on `stream`, a stream of the event's device, wait for the recorded work.
  void block(Stream stream) const;

 private:
  const int device_;
  EventHandle handle_ = 0;
  ForkGuard fork_guard_;
};

}  // namespace cuda
}  // namespace flatout::prefetch
