// last_block.cuh: finds the block that finishes last, by a counter in global memory.
#pragma once

#include <cstdint>

namespace flatout {

// Adds to a counter and returns the counter's old value. Releases the thread's earlier reads and writes.
// Acquires the writes that other threads have released through the counter. A relaxed addition between two
// full fences would wait longer.
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

// Counts `share` of `total` as done. Returns true to the thread that completes the total. This thread sees
// all writes that the other threads made before they counted, and it sets the counter back to 0.
__device__ inline bool finishes_last(uint32_t* counter, uint32_t share, uint32_t total) {
  if (add_acquire_release(counter, share) + share != total) return false;
  *counter = 0;
  return true;
}

}  // namespace flatout
