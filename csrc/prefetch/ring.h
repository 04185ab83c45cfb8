// ring.h: host buffers that are reused, so that a warm loop neither allocates nor has page faults.
#pragma once

#include <cstddef>
#include <memory>

#include "core/fork_guard.h"
#include "prefetch/cuda_api.h"

namespace flatout::prefetch {

// Host memory that is pinned for `device`, or ordinary memory for host_device. Ordinary memory is aligned to
// a cache line. From 2 MiB on, it is aligned to a huge page and requests huge pages.
class HostBuffer {
 public:
  HostBuffer(std::size_t bytes, int device);
  ~HostBuffer();
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::size_t capacity() const noexcept { return capacity_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t capacity_ = 0;
  int device_ = host_device;
  ForkGuard guard_;
};

// A buffer in use. The last copy of the pointer returns the buffer to its ring.
using Slot = std::shared_ptr<HostBuffer>;

class Ring : public std::enable_shared_from_this<Ring> {
 public:
  // Buffers are pinned for `device`, or ordinary memory for host_device. At most `max_idle` returned buffers
  // are kept, the newest. A free of pinned memory waits for the device, so the next thread that acquires a
  // buffer frees the others.
  Ring(int device, std::size_t max_idle);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Allocates a buffer if no idle buffer fits, and never waits for one.
  Slot acquire(std::size_t bytes);
  void clear();                     // frees the idle buffers
  std::size_t allocations() const;  // buffers made so far
  std::size_t idle() const;
  int device() const noexcept { return device_; }

 private:
  struct State;
  void give_back(std::unique_ptr<HostBuffer> buffer) noexcept;

  const int device_;
  const std::size_t max_idle_;
  const ForkGuard guard_;
  std::unique_ptr<State> state_;
};

}  // namespace flatout::prefetch
