// stager.h: gathers batches into slots, and copies batches to the device through slots, on separate threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "prefetch/cuda_api.h"
#include "prefetch/gather.h"
#include "prefetch/ring.h"
#include "prefetch/worker.h"

namespace flatout::prefetch {

// A batch that is being gathered. Each column has its own slot, so that a user who keeps one tensor keeps
// only the memory of this tensor.
struct Gathered {
  std::size_t bytes = 0;
  // True if the waiting thread gathers the batch itself. For a small batch, it would take longer to wake
  // another thread.
  bool left_to_waiter = false;
  std::vector<Slot> slots;  // filled when the ticket is done
  std::shared_ptr<Ticket> ticket;
  std::mutex acquiring;
};

// A batch that is being copied to the device.
struct Copied {
  std::vector<Slot> slots;             // staging memory, returned to the ring after the copy
  std::unique_ptr<cuda::Event> event;  // null on a host device; recorded when the ticket is done
  std::shared_ptr<Ticket> ticket;

  bool finished() const { return ticket->done() && (!event || event->done()); }
};

struct Transfer {
  const std::byte* from;
  std::byte* to;
  std::size_t bytes;
};

// Path of pinned sources to the device. A direct copy saves a copy on the host, but reads the source until
// the device has passed the copy. So `direct` is only for sources that are never written again.
enum class PinnedSources : std::uint8_t { direct, staged };

class Stager {
 public:
  // Gathers on `threads` threads. One of them and `helpers` more threads stage a copy.
  //
  // At most `max_in_flight` staged copies wait for the device at a time. A host that is further ahead of its
  // GPU waits, so pinned memory stays bounded.
  Stager(std::shared_ptr<Ring> ring, int threads, int device, std::size_t max_in_flight, int helpers);
  ~Stager();
  Stager(const Stager&) = delete;
  Stager& operator=(const Stager&) = delete;

  // Gathers rows `indices[0..count)`, or rows first, first + 1, ... if `indices` is null. The caller must
  // keep the columns' memory and the indices alive until the ticket is done.
  std::shared_ptr<Gathered> gather(std::shared_ptr<const std::vector<Column>> columns,
                                   const std::int64_t* indices, std::int64_t first, std::size_t count);

  // Waits for the gather. Starts the threads before, except for small batches and for a first batch that is
  // gathered quickly. The calling thread gathers, too, but not into pinned memory, because CUDA calls would
  // change the state of a user's thread.
  void wait(Gathered& batch);

  // Copies on `stream`, after the device has passed `fence` (0: no fence). The caller must keep sources,
  // destinations and fence alive until the copy is finished(). When the ticket is done, staged sources may be
  // overwritten. On a host device, copies in memory.
  std::shared_ptr<Copied> copy(std::vector<Transfer> transfers, PinnedSources pinned, cuda::Stream stream,
                               cuda::EventHandle fence);

  // Ends the threads and waits for running copies. Jobs that have not begun fail with "closed".
  void close() noexcept;

 private:
  void run_copy(const std::vector<Transfer>& transfers, PinnedSources pinned, cuda::Stream stream,
                cuda::EventHandle fence, const std::shared_ptr<Copied>& copied);
  void enqueue(const std::vector<Transfer>& transfers, PinnedSources pinned, cuda::Stream stream,
               cuda::EventHandle fence, Copied& copied);
  void stage(const std::vector<Transfer>& transfers, cuda::Stream stream, Copied& copied);
  void send(std::byte* to, const std::byte* from, std::size_t bytes, cuda::Stream stream) const;
  void hold_until_passed(const std::shared_ptr<Copied>& copied, cuda::Stream stream);
  void reap(std::size_t allowed);

  const std::shared_ptr<Ring> ring_;
  const int device_;
  const std::size_t max_in_flight_;
  const ForkGuard guard_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Copied>> in_flight_;
  std::atomic<bool> has_waited_ = false;
  const bool has_helpers_;
  Worker helpers_;
  Worker worker_;  // last, so that its threads end before the other members
};

}  // namespace flatout::prefetch
