// last_block.cuh: finds the block that finishes last, by a counter in global memory.
#pragma once

#include <cstdint>

namespace flatout {

// Adds to a counter and returns its old value. This operation releases earlier writes of the thread, and
// acquires writes that other threads have released on the counter. Two full fences would wait longer.
__device__ inline uint32_t add_acquire_release(uint32_t* counter, uint32_t value) {
#ifdef __CUDACC__
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(__cvta_generic_to_global(counter)), "r"(value)
               : "memory");
  return old;
#else
  return emulated::add_acquire_release(counter, value);
#endif
}

// Counts `share` of `total` as done by the calling thread. True for the thread that completes the total. This
// thread sees earlier writes of all threads that have counted, and resets the counter to 0.
__device__ inline bool finishes_last(uint32_t* counter, uint32_t share, uint32_t total) {
  if (add_acquire_release(counter, share) + share != total) return false;
  *counter = 0;
  return true;
}

}  // namespace flatout
