// stager.cpp: the gather and copy jobs.
#include "prefetch/stager.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

namespace flatout::prefetch {
namespace {

// Device copies start at addresses the copy engine likes; also keeps leaves of a batch off each other's cache
// lines.
constexpr std::size_t staging_alignment = 256;

std::size_t aligned(std::size_t bytes) {
  return (bytes + staging_alignment - 1) / staging_alignment * staging_alignment;
}

}  // namespace

Stager::Stager(std::shared_ptr<Ring> ring, int threads, int device, std::size_t max_in_flight)
    : ring_(std::move(ring)),
      device_(device),
      max_in_flight_(std::max<std::size_t>(max_in_flight, 1)),
      worker_(threads) {}

Stager::~Stager() { close(); }

std::shared_ptr<Gathered> Stager::gather(std::shared_ptr<const std::vector<Column>> columns,
                                         const std::int64_t* indices, std::int64_t first, std::size_t count) {
  auto batch = std::make_shared<Gathered>();
  batch->ticket = worker_.submit([ring = ring_, columns = std::move(columns), indices, first, count, batch] {
    if (ring->device() != host_device) cuda::enter_thread(ring->device());
    std::vector<Slot> slots;
    slots.reserve(columns->size());
    for (const Column& column : *columns) {
      Slot slot = ring->acquire(count * column.row_bytes);
      if (indices != nullptr) {
        gather_rows(column, indices, count, slot->data());
      } else {
        copy_rows(column, first, count, slot->data());
      }
      slots.push_back(std::move(slot));
    }
    batch->slots = std::move(slots);
  });
  return batch;
}

void Stager::wait(Gathered& batch) {
  if (ring_->device() == host_device) {
    worker_.help(*batch.ticket);
  } else {
    batch.ticket->wait();
  }
}

std::shared_ptr<Copied> Stager::copy(std::vector<Transfer> transfers, PinnedSources pinned,
                                     cuda::Stream stream, cuda::EventHandle fence) {
  auto copied = std::make_shared<Copied>();
  copied->ticket = worker_.submit([this, transfers = std::move(transfers), pinned, stream, fence, copied] {
    run_copy(transfers, pinned, stream, fence, copied);
  });
  return copied;
}

void Stager::run_copy(const std::vector<Transfer>& transfers, PinnedSources pinned, cuda::Stream stream,
                      cuda::EventHandle fence, const std::shared_ptr<Copied>& copied) {
  if (device_ == host_device) {
    enqueue(transfers, pinned, stream, fence, *copied);
    copied->slot.reset();
    return;
  }
  cuda::enter_thread(device_);
  copied->event = std::make_unique<cuda::Event>();
  reap(max_in_flight_ - 1);
  try {
    enqueue(transfers, pinned, stream, fence, *copied);
  } catch (const std::exception&) {
    // What was enqueued before the failure still reads the sources and writes the destinations.
    try {
      hold_until_passed(copied, stream);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
      // The device is lost, and nothing copies any more.
    }
    throw;
  }
  hold_until_passed(copied, stream);
}

void Stager::enqueue(const std::vector<Transfer>& transfers, PinnedSources pinned, cuda::Stream stream,
                     cuda::EventHandle fence, Copied& copied) {
  const bool on_device = device_ != host_device;
  std::vector<bool> direct(transfers.size());
  std::size_t staged_bytes = 0;
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    direct[i] = on_device && pinned == PinnedSources::direct && cuda::is_pinned(transfers[i].from);
    if (!direct[i]) staged_bytes += aligned(transfers[i].bytes);
  }
  if (staged_bytes != 0) copied.slot = ring_->acquire(staged_bytes);

  if (fence != 0) cuda::wait_event(stream, fence);
  std::size_t offset = 0;
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    const auto [from, to, bytes] = transfers[i];
    const std::byte* source = from;
    if (!direct[i]) {
      std::byte* staged = copied.slot->data() + offset;
      std::memcpy(staged, from, bytes);
      source = staged;
      offset += aligned(bytes);
    }
    if (on_device) {
      cuda::copy_to_device_async(to, source, bytes, stream);
    } else {
      std::memcpy(to, source, bytes);
    }
  }
}

void Stager::hold_until_passed(const std::shared_ptr<Copied>& copied, cuda::Stream stream) {
  copied->event->record(stream);
  const std::lock_guard lock(mutex_);
  in_flight_.push_back(copied);
}

void Stager::reap(std::size_t allowed) {
  for (;;) {
    std::shared_ptr<Copied> oldest;
    {
      const std::lock_guard lock(mutex_);
      while (!in_flight_.empty() && in_flight_.front()->event->done()) {
        in_flight_.front()->slot.reset();
        in_flight_.pop_front();
      }
      if (in_flight_.size() <= allowed) return;
      oldest = in_flight_.front();
    }
    oldest->event->synchronize();
  }
}

void Stager::close() noexcept {
  if (guard_.forked()) return;
  worker_.close();
  try {
    reap(0);
  } catch (const std::exception&) {
    // The device is lost: nothing copies any more, so what the copies used may go.
    in_flight_.clear();
  }
}

}  // namespace flatout::prefetch
