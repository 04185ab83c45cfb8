// fork_guard.cpp: a counter that every fork increments in the child. getpid() would be a system call per use.
#include "core/fork_guard.h"

#include <pthread.h>

#include <atomic>
#include <stdexcept>

namespace flatout {
namespace {

std::atomic<unsigned> generation{0};

unsigned current_generation() noexcept {
  static const int installed = pthread_atfork(nullptr, nullptr, [] { ++generation; });
  static_cast<void>(installed);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace

ForkGuard::ForkGuard() noexcept : generation_(current_generation()) {}

bool ForkGuard::forked() const noexcept { return generation_ != current_generation(); }

void ForkGuard::check() const {
  if (forked()) {
    throw std::runtime_error(
        "this prefetcher's threads stayed in the parent process: make a new iterator after fork()");
  }
}

}  // namespace flatout
