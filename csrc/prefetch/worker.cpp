// worker.cpp: the thread loop of Worker, and the end of the threads.
#include "prefetch/worker.h"

#include <pthread.h>
#include <signal.h>

#include <deque>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/wait.h"

namespace flatout::prefetch {
namespace {

// Threads that are made inside this scope block all signals. The main thread handles signals, because
// Python's handlers run there.
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
  wait_on(ended_, lock, [this] { return done_; });
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
  ended_.notify_all();  // under the lock: the waiter may destroy the ticket after the unlock
}

struct Worker::State {
  struct Task {
    Job job;
    std::size_t parts;
    std::shared_ptr<Ticket> ticket = std::make_shared<Ticket>();
    std::size_t begun = 0;
    std::size_t ended = 0;
    std::exception_ptr error = nullptr;  // the first error

    void finish() {
      job = nullptr;  // releases the job's captures before the ticket is done
      ticket->finish(std::move(error));
    }
  };

  struct Part {
    std::shared_ptr<Task> task;
    std::size_t number = 0;
  };

  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable still;           // no part runs
  std::deque<std::shared_ptr<Task>> line;  // tasks with parts that have not begun
  bool closing = false;
  bool joined = false;
  int helpers = 0;  // callers that run a part
  std::vector<std::thread> threads;

  Part next() {  // requires the lock, and a line that is not empty
    const std::shared_ptr<Task> task = line.front();
    const std::size_t number = task->begun++;
    if (task->begun == task->parts) line.pop_front();
    return {task, number};
  }

  void perform(const Part& part) {
    Task& task = *part.task;
    std::exception_ptr error;
    try {
      task.job(part.number);
    } catch (...) {
      error = std::current_exception();
    }
    bool last = false;
    {
      const std::lock_guard lock(mutex);
      if (!task.error) task.error = std::move(error);
      last = ++task.ended == task.parts;
    }
    if (last) task.finish();
  }

  void run() {
    pthread_setname_np(pthread_self(), "flatout-data");
    for (;;) {
      Part part;
      {
        std::unique_lock lock(mutex);
        wait_on(wake, lock, [this] { return closing || !line.empty(); });
        if (closing) return;
        part = next();
      }
      perform(part);
    }
  }

  // Runs a part in the calling thread. Returns false if there is none.
  bool lend_a_hand() {
    Part part;
    {
      const std::lock_guard lock(mutex);
      if (closing || line.empty()) return false;
      part = next();
      ++helpers;
    }
    perform(part);
    const std::lock_guard lock(mutex);
    if (--helpers == 0) still.notify_all();
    return true;
  }
};

Worker::Worker(int threads) : size_(threads), state_(std::make_unique<State>()) {
  if (threads < 1) throw std::invalid_argument("threads must be >= 1, got " + std::to_string(threads));
}

Worker::~Worker() {
  close();
  // In a forked child the threads do not exist, so there is nothing to join.
  if (guard_.forked()) {
    [[maybe_unused]] State* leaked = state_.release();
  }
}

void Worker::start() {
  guard_.check();
  const std::lock_guard lock(state_->mutex);
  if (state_->closing || !state_->threads.empty()) return;
  const SignalsBlocked scope;
  for (int i = 0; i < size_; ++i) {
    try {
      state_->threads.emplace_back([state = state_.get()] { state->run(); });
    } catch (const std::system_error&) {
      if (i == 0) throw;
      return;  // fewer threads are enough
    }
  }
}

std::shared_ptr<Ticket> Worker::submit(Job job, std::size_t parts, Wake wake) {
  guard_.check();
  const auto task = std::make_shared<State::Task>(std::move(job), parts);
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closing) throw closed();
    state_->line.push_back(task);
  }
  if (wake == Wake::none) return task->ticket;
  if (parts == 1) {
    state_->wake.notify_one();
  } else {
    state_->wake.notify_all();
  }
  return task->ticket;
}

void Worker::help(Ticket& ticket) {
  guard_.check();
  while (!ticket.done() && state_->lend_a_hand()) {
  }
  ticket.wait();
}

void Worker::close() noexcept {
  if (guard_.forked()) return;
  std::deque<std::shared_ptr<State::Task>> dropped;
  std::vector<std::thread> threads;
  bool first = false;
  {
    const std::lock_guard lock(state_->mutex);
    first = !state_->closing;
    state_->closing = true;
    dropped.swap(state_->line);
    threads.swap(state_->threads);  // so that a second close() has nothing left to join
  }
  state_->wake.notify_all();
  for (auto& thread : threads) thread.join();
  {
    // If two threads close the worker, both return after the last task has ended.
    std::unique_lock lock(state_->mutex);
    state_->joined = state_->joined || first;
    state_->still.notify_all();
    wait_on(state_->still, lock, [this] { return state_->joined && state_->helpers == 0; });
  }
  for (const auto& task : dropped) {
    task->error = std::make_exception_ptr(closed());
    task->finish();
  }
}

}  // namespace flatout::prefetch
