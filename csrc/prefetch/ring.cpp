// ring.cpp: best-fit reuse of returned host buffers.
#include "prefetch/ring.h"

#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <new>
#include <utility>

namespace flatout::prefetch {
namespace {

constexpr std::size_t cache_line = 64;
constexpr std::size_t page = 4096;
constexpr std::size_t huge_page = std::size_t{2} * 1024 * 1024;
// Buffers up to this size may be much larger than requested, because they waste little memory.
constexpr std::size_t small = std::size_t{64} * 1024;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::size_t alignment_of(std::size_t capacity) { return capacity >= huge_page ? huge_page : cache_line; }

}  // namespace

HostBuffer::HostBuffer(std::size_t bytes, int device)
    : capacity_(round_up(std::max<std::size_t>(bytes, 1), bytes < page ? cache_line : page)),
      device_(device) {
  if (device != host_device) {
    data_ = static_cast<std::byte*>(cuda::allocate_pinned(capacity_, device));
    return;
  }
  const std::size_t alignment = alignment_of(capacity_);
  data_ =
      static_cast<std::byte*>(::operator new(round_up(capacity_, alignment), std::align_val_t{alignment}));
  // This is only a hint, so a failure is ignored.
  if (alignment == huge_page) madvise(data_, round_up(capacity_, alignment), MADV_HUGEPAGE);
}

HostBuffer::~HostBuffer() {
  if (device_ == host_device) {
    ::operator delete(data_, std::align_val_t{alignment_of(capacity_)});
  } else if (!guard_.forked()) {  // a forked child must not call CUDA
    cuda::free_pinned(data_, device_);
  }
}

struct Ring::State {
  std::mutex mutex;
  std::deque<std::unique_ptr<HostBuffer>> idle;     // most recently returned last
  std::deque<std::unique_ptr<HostBuffer>> surplus;  // pinned, freed by the next acquire
  std::size_t allocations = 0;
};

Ring::Ring(int device, std::size_t max_idle)
    : device_(device), max_idle_(max_idle), state_(std::make_unique<State>()) {}

Ring::~Ring() {
  // Another thread may have been changing the deque at the fork, so the child does not touch it.
  if (guard_.forked()) {
    [[maybe_unused]] State* leaked = state_.release();
  }
}

Slot Ring::acquire(std::size_t bytes) {
  guard_.check();
  std::unique_ptr<HostBuffer> buffer;
  {
    std::deque<std::unique_ptr<HostBuffer>> freed;  // freed after the lock is released
    const std::lock_guard lock(state_->mutex);
    freed.swap(state_->surplus);
    // Takes the smallest buffer that fits, but no buffer that is much too large. Otherwise a user who keeps
    // the labels of all batches would keep buffers of the size of images. Among equal buffers, the newest is
    // most likely still in the cache.
    auto best = state_->idle.rend();
    for (auto it = state_->idle.rbegin(); it != state_->idle.rend(); ++it) {
      const std::size_t capacity = (*it)->capacity();
      if (capacity < bytes || capacity > std::max(2 * bytes, small)) continue;
      if (best == state_->idle.rend() || capacity < (*best)->capacity()) best = it;
    }
    if (best != state_->idle.rend()) {
      buffer = std::move(*best);
      state_->idle.erase(std::next(best).base());
    } else {
      ++state_->allocations;
    }
  }
  if (!buffer) buffer = std::make_unique<HostBuffer>(bytes, device_);
  return Slot(buffer.release(), [ring = shared_from_this()](HostBuffer* returned) {
    ring->give_back(std::unique_ptr<HostBuffer>(returned));
  });
}

void Ring::give_back(std::unique_ptr<HostBuffer> buffer) noexcept {
  if (guard_.forked()) return;         // frees the buffer without the lock, which the parent may have held
  std::unique_ptr<HostBuffer> oldest;  // freed after the lock is released
  const std::lock_guard lock(state_->mutex);
  state_->idle.push_back(std::move(buffer));
  if (state_->idle.size() <= max_idle_) return;
  oldest = std::move(state_->idle.front());
  state_->idle.pop_front();
  if (device_ != host_device) state_->surplus.push_back(std::move(oldest));
}

void Ring::clear() {
  if (guard_.forked()) return;
  std::deque<std::unique_ptr<HostBuffer>> idle, surplus;  // freed after the lock is released
  const std::lock_guard lock(state_->mutex);
  idle.swap(state_->idle);
  surplus.swap(state_->surplus);
}

std::size_t Ring::allocations() const {
  guard_.check();
  const std::lock_guard lock(state_->mutex);
  return state_->allocations;
}

std::size_t Ring::idle() const {
  guard_.check();
  const std::lock_guard lock(state_->mutex);
  return state_->idle.size();
}

}  // namespace flatout::prefetch
