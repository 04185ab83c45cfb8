// cuda_api.h: the few CUDA runtime calls of the prefetcher; in a build without CUDA every one throws.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/fork_guard.h"

namespace flatout::prefetch {

inline constexpr int host_device = -1;

namespace cuda {

using Stream = std::uintptr_t;       // a cudaStream_t, as torch hands it out (`stream.cuda_stream`)
using EventHandle = std::uintptr_t;  // a cudaEvent_t, as torch hands it out (`event.cuda_event`)

// True when CUDA was compiled in, the driver is new enough for our static runtime, and a device is there.
bool usable() noexcept;

// Prepares a thread of the prefetcher, which must call this function first. Makes `device` current and binds
// the thread to the CPUs near `device`. Later calls of the thread do not break a capture of a CUDA graph by
// the user.
void enter_thread(int device);
// Creates a non-blocking stream that no other code uses. torch's pool would return the same stream to other
// code after 32 requests. The stream lives as long as the process.
Stream create_stream(int device);

// Pinned in the context of `device`, whichever is current: a context on another one would cost its memory.
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
  // Makes later work on `stream`, a stream of the event's device, wait for what was recorded.
  void block(Stream stream) const;

 private:
  const int device_;
  EventHandle handle_ = 0;
  ForkGuard fork_guard_;
};

}  // namespace cuda
}  // namespace flatout::prefetch
