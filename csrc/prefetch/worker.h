// worker.h: threads that run the parts of submitted jobs, first in, first out, and report their errors.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "core/fork_guard.h"

namespace flatout::prefetch {

// The state of one job, for the caller.
class Ticket {
 public:
  void wait();  // returns when the job has ended; rethrows its error
  bool done() const;
  void finish(std::exception_ptr error);

 private:
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::exception_ptr error_;
  ForkGuard guard_;
};

// Threads that a submitted job wakes. With `none`, the job waits for a helper, or for threads that another
// job wakes.
enum class Wake : std::uint8_t { threads, none };

class Worker {
 public:
  using Job = std::function<void(std::size_t part)>;

  explicit Worker(int threads);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Starts the threads, or fewer if the system refuses more. Before this call, jobs wait for a helper.
  // Idempotent. Throws std::system_error if no thread can be started.
  void start();
  // Calls `job` once for each part, on several threads at a time. The job ends with the last part.
  std::shared_ptr<Ticket> submit(Job job, std::size_t parts = 1, Wake wake = Wake::threads);
  // Waits for a ticket. Until the job has ended, the calling thread also runs parts that wait in line.
  void help(Ticket& ticket);
  // Ends the threads. Jobs with parts that have not begun fail with "closed". Returns when no part runs.
  // Idempotent.
  void close() noexcept;

 private:
  struct State;

  const ForkGuard guard_;
  const int size_;
  std::unique_ptr<State> state_;
};

}  // namespace flatout::prefetch
