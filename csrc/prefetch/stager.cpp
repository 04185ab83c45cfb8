// stager.cpp: the gather and copy jobs.
#include "prefetch/stager.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <exception>
#include <system_error>
#include <utility>

namespace flatout::prefetch {
namespace {

// Alignment of device copies, for the copy engine. Leaves of a batch share no cache line.
constexpr std::size_t staging_alignment = 256;

// Bytes that a thread gathers at a time. A longer row is gathered whole. The number is large enough for a low
// overhead of scheduling, and small enough that close() and the last part take little time.
constexpr std::size_t part_bytes = std::size_t{128} * 1024;
// A smaller batch is gathered in less time than a thread takes to start, so next(iter(loader)) starts none.
constexpr std::size_t worth_a_thread = std::size_t{1024} * 1024;
// Batches from this size on are written past the caches, because the caches would drop them before the reader
// comes.
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

// Bytes that are staged and copied at a time. The device copies a piece while the next pieces are staged. A
// piece is large enough for the speed of the bus, and batches of all sizes use the same buffers.
constexpr std::size_t piece_bytes = std::size_t{4} * 1024 * 1024;

// Part of one transfer, and its place in a piece.
struct Segment {
  Transfer transfer;
  std::size_t offset;
};
using Piece = std::vector<Segment>;

std::vector<Piece> cut(const std::vector<Transfer>& transfers) {
  std::vector<Piece> pieces;
  std::size_t used = piece_bytes;
  for (Transfer left : transfers) {
    while (left.bytes != 0) {
      if (used == piece_bytes) {
        pieces.emplace_back();
        used = 0;
      }
      const std::size_t bytes = std::min(left.bytes, piece_bytes - used);
      pieces.back().push_back({{left.from, left.to, bytes}, used});
      used += aligned(bytes);
      left = {left.from + bytes, left.to + bytes, left.bytes - bytes};
    }
  }
  return pieces;
}

// Returns a power of two. With few sizes, a returned buffer fits a later piece.
std::size_t capacity_for(const Piece& piece) {
  return std::bit_ceil(piece.back().offset + piece.back().transfer.bytes);
}

void fill(const Piece& piece, std::byte* staged) {
  for (const auto& [transfer, offset] : piece) std::memcpy(staged + offset, transfer.from, transfer.bytes);
}

// Pieces that threads fill. The destructor waits for the threads, because they read the sources and pieces.
class Filling {
 public:
  Filling(Worker& helpers, const std::vector<Piece>& pieces) : helpers_(helpers), pieces_(pieces) {
    tickets_.reserve(pieces.size());
  }
  ~Filling() {  // NOLINT(bugprone-exception-escape): memcpy throws nothing
    for (const auto& ticket : tickets_) helpers_.help(*ticket);
  }
  Filling(const Filling&) = delete;
  Filling& operator=(const Filling&) = delete;

  void start(std::byte* staged) {
    const Piece& piece = pieces_[tickets_.size()];
    tickets_.push_back(helpers_.submit([&piece, staged](std::size_t) { fill(piece, staged); }));
  }
  void wait(std::size_t piece) { helpers_.help(*tickets_[piece]); }

 private:
  Worker& helpers_;
  const std::vector<Piece>& pieces_;
  std::vector<std::shared_ptr<Ticket>> tickets_;
};

}  // namespace

Stager::Stager(std::shared_ptr<Ring> ring, int threads, int device, std::size_t max_in_flight, int helpers)
    : ring_(std::move(ring)),
      device_(device),
      max_in_flight_(std::max<std::size_t>(max_in_flight, 1)),
      has_helpers_(helpers > 0),
      helpers_(std::max(helpers, 1)),
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
  batch->ticket = worker_.submit(gather_part, parts, batch->left_to_waiter ? Wake::none : Wake::threads);
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
        worker_.close();  // the caller frees memory that the jobs read
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
    copied->slots.clear();
    return;
  }
  cuda::enter_thread(device_);
  copied->event = std::make_unique<cuda::Event>(device_);
  reap(max_in_flight_ - 1);
  try {
    enqueue(transfers, pinned, stream, fence, *copied);
  } catch (const std::exception&) {
    // Copies that were enqueued before the failure still read the sources and write the destinations.
    try {
      hold_until_passed(copied, stream);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
      // The device is lost, and no copy runs.
    }
    throw;
  }
  hold_until_passed(copied, stream);
}

void Stager::enqueue(const std::vector<Transfer>& transfers, PinnedSources pinned, cuda::Stream stream,
                     cuda::EventHandle fence, Copied& copied) {
  const bool on_device = device_ != host_device;
  if (on_device && fence != 0) cuda::wait_event(stream, fence);
  std::vector<Transfer> staged;
  for (const Transfer& transfer : transfers) {
    if (on_device && pinned == PinnedSources::direct && cuda::is_pinned(transfer.from)) {
      send(transfer.to, transfer.from, transfer.bytes, stream);
    } else {
      staged.push_back(transfer);
    }
  }
  stage(staged, stream, copied);
}

void Stager::stage(const std::vector<Transfer>& transfers, cuda::Stream stream, Copied& copied) {
  const std::vector<Piece> pieces = cut(transfers);
  if (pieces.size() > 1 && has_helpers_) {
    try {
      helpers_.start();
    } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch)
      // Without helpers, this thread stages alone.
    }
  }
  Filling filling(helpers_, pieces);
  for (const Piece& piece : pieces) {
    copied.slots.push_back(ring_->acquire(capacity_for(piece)));
    filling.start(copied.slots.back()->data());
  }
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    filling.wait(i);
    for (const auto& [transfer, offset] : pieces[i])
      send(transfer.to, copied.slots[i]->data() + offset, transfer.bytes, stream);
  }
}

void Stager::send(std::byte* to, const std::byte* from, std::size_t bytes, cuda::Stream stream) const {
  if (device_ == host_device) {
    std::memcpy(to, from, bytes);
  } else {
    cuda::copy_to_device_async(to, from, bytes, stream);
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
        in_flight_.front()->slots.clear();
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
  helpers_.close();
  try {
    reap(0);
  } catch (const std::exception&) {
    // The device is lost. No copy runs, so the memory of copies may be freed.
    in_flight_.clear();
  }
}

}  // namespace flatout::prefetch
