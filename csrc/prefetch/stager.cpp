// stager.cpp: the gather and copy jobs.
#include "prefetch/stager.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <system_error>
#include <utility>

namespace flatout::prefetch {
namespace {

// Device copies start at addresses the copy engine likes; also keeps leaves of a batch off each other's cache
// lines.
constexpr std::size_t staging_alignment = 256;

// Gathered at a time by one thread, if a row is not longer: long enough that handing it out costs nothing,
// short enough that neither who closes nor who waits for the last part waits long.
constexpr std::size_t part_bytes = std::size_t{128} * 1024;
// A smaller batch is gathered in less time than a thread takes to start: who takes only one, like
// next(iter(loader)), needs none.
constexpr std::size_t worth_a_thread = std::size_t{1024} * 1024;
// A batch of so many bytes will have left the caches before it is read.
constexpr std::size_t streamed_batch = std::size_t{8} * 1024 * 1024;

std::vector<Slot> acquire(Ring& ring, const std::vector<Column>& columns, std::size_t count) {
  std::vector<Slot> slots;
  slots.reserve(columns.size());
  for (const Column& column : columns) slots.push_back(ring.acquire(count * column.row_bytes));
  return slots;
}

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
  std::size_t row_bytes = 0;
  for (const Column& column : *columns) row_bytes += column.row_bytes;
  const std::size_t rows = std::max<std::size_t>(part_bytes / std::max<std::size_t>(row_bytes, 1), 1);
  auto batch = std::make_shared<Gathered>();
  batch->bytes = count * row_bytes;
  const Writes writes = batch->bytes >= streamed_batch ? Writes::streamed : Writes::cached;
  const auto gather_part = [=, ring = ring_, columns = std::move(columns)](std::size_t part) {
    if (ring->device() != host_device) cuda::enter_thread(ring->device());
    {
      const std::lock_guard lock(batch->acquiring);
      if (batch->slots.empty()) batch->slots = acquire(*ring, *columns, count);
    }
    const std::size_t begin = part * rows, size = std::min(rows, count - begin);
    for (std::size_t i = 0; i < columns->size(); ++i) {
      const Column& column = (*columns)[i];
      std::byte* out = batch->slots[i]->data() + begin * column.row_bytes;
      if (indices == nullptr) {
        copy_rows(column, first + static_cast<std::int64_t>(begin), size, out);
      } else {
        gather_rows(column, indices + begin, size, out, writes);
      }
    }
  };
  const std::size_t parts = std::max<std::size_t>((count + rows - 1) / rows, 1);
  batch->left_to_waiter = batch->bytes <= part_bytes && ring_->device() == host_device;
  batch->ticket = worker_.submit(gather_part, parts, batch->left_to_waiter ? Wake::nobody : Wake::threads);
  return batch;
}

void Stager::wait(Gathered& batch) {
  const bool on_host = ring_->device() == host_device;
  if (batch.left_to_waiter) return worker_.help(*batch.ticket);
  if (has_waited_.exchange(true) || batch.bytes >= worth_a_thread || !on_host) {
    try {
      worker_.start();
    } catch (const std::system_error&) {
      if (!on_host) {
        worker_.close();  // the caller will let go of what the jobs read
        throw;
      }
      // This thread gathers alone.
    }
  }
  if (on_host) {
    worker_.help(*batch.ticket);
  } else {
    batch.ticket->wait();
  }
}

std::shared_ptr<Copied> Stager::copy(std::vector<Transfer> transfers, PinnedSources pinned,
                                     cuda::Stream stream, cuda::EventHandle fence) {
  worker_.start();
  auto copied = std::make_shared<Copied>();
  copied->ticket = worker_.submit([this, transfers = std::move(transfers), pinned, stream, fence, copied](
                                      std::size_t) { run_copy(transfers, pinned, stream, fence, copied); });
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
  copied->event = std::make_unique<cuda::Event>(device_);
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

  if (on_device && fence != 0) cuda::wait_event(stream, fence);
  std::size_t offset = 0;
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    const auto [from, to, bytes] = transfers[i];
    if (bytes == 0) continue;
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
