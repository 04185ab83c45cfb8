// worker.h: a few threads that run the parts of submitted jobs first in, first out, and carry their errors
// back.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "core/fork_guard.h"

namespace flatout::prefetch {

// The caller's end of one job.
class Ticket {
 public:
  void wait();  // returns when the job has ended; throws what the job threw
  bool done() const;
  void finish(std::exception_ptr error);

 private:
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::exception_ptr error_;
  ForkGuard guard_;
};

// Threads that a submitted job wakes. With `none`, it waits for a helper, or for threads that another job
// wakes.
enum class Wake : std::uint8_t { threads, none };

class Worker {
 public:
  using Job = std::function<void(std::size_t part)>;

  explicit Worker(int threads);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Makes the threads, as many as can be had; until then jobs wait in line for a helper. Idempotent. Throws
  // std::system_error where not even one can be had.
  void start();
  // `job` is called once for each part, on several threads at a time; it ends with the last of them.
  std::shared_ptr<Ticket> submit(Job job, std::size_t parts = 1, Wake wake = Wake::threads);
  // Ticket::wait(), lending a hand: while the job has not ended, the calling thread runs parts that wait in
  // line.
  void help(Ticket& ticket);
  // Jobs with parts that have not begun fail with "closed"; returns when no part runs any more. Idempotent.
  void close() noexcept;

 private:
  struct State;

  const ForkGuard guard_;
  const int size_;
  std::unique_ptr<State> state_;
};

}  // namespace flatout::prefetch
