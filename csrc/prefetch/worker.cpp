// worker.cpp: the thread loop behind Worker and its end.
#include "prefetch/worker.h"

#include <pthread.h>
#include <signal.h>

#include <deque>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace flatout::prefetch {
namespace {

// Signals are the main thread's business (Python's handlers run there): threads made inside this scope block
// all.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t previous_;
};

std::runtime_error closed() { return std::runtime_error("the prefetcher was closed"); }

}  // namespace

void Ticket::wait() {
  guard_.check();
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [this] { return done_; });
  if (error_) std::rethrow_exception(error_);
}

bool Ticket::done() const {
  if (guard_.forked()) return false;
  const std::lock_guard lock(mutex_);
  return done_;
}

void Ticket::finish(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
  done_ = true;
  ended_.notify_all();  // under the lock: the waiter may destroy the ticket as soon as it is released
}

struct Worker::State {
  struct Task {
    Job job;
    std::shared_ptr<Ticket> ticket;
  };

  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable still;  // nothing runs any more
  std::deque<Task> queue;
  bool closing = false;
  bool joined = false;
  int helpers = 0;  // callers that run a job
  std::vector<std::thread> threads;

  Task next() {  // under the lock, from a queue that is not empty
    Task task = std::move(queue.front());
    queue.pop_front();
    return task;
  }

  static void perform(Task task) {
    std::exception_ptr error;
    try {
      task.job();
    } catch (...) {
      error = std::current_exception();
    }
    task.job = nullptr;  // what the job holds is released before its end is announced
    task.ticket->finish(std::move(error));
  }

  void run() {
    pthread_setname_np(pthread_self(), "flatout-data");
    for (;;) {
      Task task;
      {
        std::unique_lock lock(mutex);
        wake.wait(lock, [this] { return closing || !queue.empty(); });
        if (closing) return;
        task = next();
      }
      perform(std::move(task));
    }
  }

  // Whether there was a job to run.
  bool lend_a_hand() {
    Task task;
    {
      const std::lock_guard lock(mutex);
      if (closing || queue.empty()) return false;
      task = next();
      ++helpers;
    }
    perform(std::move(task));
    const std::lock_guard lock(mutex);
    if (--helpers == 0) still.notify_all();
    return true;
  }
};

Worker::Worker(int threads) : state_(std::make_unique<State>()) {
  if (threads < 1) throw std::invalid_argument("threads must be >= 1, got " + std::to_string(threads));
  const SignalsBlocked scope;
  try {
    for (int i = 0; i < threads; ++i) state_->threads.emplace_back([state = state_.get()] { state->run(); });
  } catch (...) {
    close();
    throw;
  }
}

Worker::~Worker() {
  close();
  // Its threads do not exist in a forked child: nothing to join there.
  if (guard_.forked()) {
    [[maybe_unused]] State* leaked = state_.release();
  }
}

std::shared_ptr<Ticket> Worker::submit(Job job) {
  guard_.check();
  auto ticket = std::make_shared<Ticket>();
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closing) throw closed();
    state_->queue.push_back({std::move(job), ticket});
  }
  state_->wake.notify_one();
  return ticket;
}

void Worker::help(Ticket& ticket) {
  guard_.check();
  while (!ticket.done() && state_->lend_a_hand()) {
  }
  ticket.wait();
}

void Worker::close() noexcept {
  if (guard_.forked()) return;
  std::deque<State::Task> dropped;
  std::vector<std::thread> threads;
  bool first = false;
  {
    const std::lock_guard lock(state_->mutex);
    first = !state_->closing;
    state_->closing = true;
    dropped.swap(state_->queue);
    threads.swap(state_->threads);  // so that a second close() has nothing left to join
  }
  state_->wake.notify_all();
  for (auto& thread : threads) thread.join();
  {
    // Whoever closes, and whoever comes second, returns when nothing runs any more.
    std::unique_lock lock(state_->mutex);
    state_->joined = state_->joined || first;
    state_->still.notify_all();
    state_->still.wait(lock, [this] { return state_->joined && state_->helpers == 0; });
  }
  for (auto& task : dropped) task.ticket->finish(std::make_exception_ptr(closed()));
}

}  // namespace flatout::prefetch
