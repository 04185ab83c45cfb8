// worker.h: a few threads that run submitted jobs first in, first out, and carry their errors back.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "prefetch/fork_guard.h"

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

class Worker {
 public:
  using Job = std::function<void()>;

  explicit Worker(int threads);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::shared_ptr<Ticket> submit(Job job);
  // Ticket::wait(), lending a hand: while the job has not ended, the calling thread runs those that wait in
  // line.
  void help(Ticket& ticket);
  // Jobs that have not begun fail with "closed"; returns when the running ones have ended. Idempotent.
  void close() noexcept;

 private:
  struct State;

  const ForkGuard guard_;
  std::unique_ptr<State> state_;
};

}  // namespace flatout::prefetch
