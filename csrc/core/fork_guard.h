// fork_guard.h: tells objects that own threads or locks whether they now live in a forked child.
#pragma once

namespace flatout {

// Remembers the process that made it. A forked child has none of its parent's threads, and may have inherited
// a locked mutex: what `forked()` finds there is leaked, never joined or locked.
class ForkGuard {
 public:
  ForkGuard() noexcept;
  bool forked() const noexcept;
  void check() const;  // throws std::runtime_error in a forked child

 private:
  unsigned generation_;
};

}  // namespace flatout
