// fork_guard.h: detection of a fork, for objects that own threads or locks.
#pragma once

namespace flatout {

// Guard that knows the process in which it was made. A forked child has none of its parent's threads, and may
// have inherited a locked mutex. So if `forked()` is true, the owner must leak its threads and locks, and
// never join or lock them.
class ForkGuard {
 public:
  ForkGuard() noexcept;
  bool forked() const noexcept;
  void check() const;  // throws std::runtime_error in a forked child

 private:
  unsigned generation_;
};

}  // namespace flatout
