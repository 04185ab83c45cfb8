// wait.h: a wait for a condition, with symbols that older versions of libstdc++ have.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <mutex>

namespace flatout {

// Replaces `condition.wait(lock, predicate)`. g++ 12 links that call to a symbol of GLIBCXX_3.4.30. A system
// of manylinux_2_34 lacks this symbol, and has all others that this library needs.
template <class Predicate>
void wait_on(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, Predicate predicate) {
  while (!predicate()) pthread_cond_wait(condition.native_handle(), lock.mutex()->native_handle());
}

}  // namespace flatout
