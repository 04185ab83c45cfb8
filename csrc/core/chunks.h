// chunks.h: cuts lists of tensors into chunks and chunks into aligned vectors. Host code can call these
// functions, too. Tests compare a kernel with a loop on the host over the kernel's threads.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "core/scalar.h"

namespace flatout {

// Elements per chunk. A chunk is the work of one CUDA block, and each partial sum of a norm covers one chunk.
// The number is a constant, so that sums do not depend on the number of threads. The number is a multiple of
// every vector width, so that all chunks of a tensor have the same misalignment.
inline constexpr uint32_t kChunk = 16384;
inline constexpr int kVectorBytes = 16;
inline constexpr uint32_t kLanes = 32;        // threads of a warp
inline constexpr int kArgumentBytes = 32764;  // limit for all arguments of a kernel (CUDA >= 12.1)
// Weight, gradient, three states, average, 16-bit companion, three absmaxes.
inline constexpr int kMaxStreams = 10;

// One tensor and its companions, as flat arrays. All have `numel` elements, except absmaxes.
struct FlatTensor {
  void* address[kMaxStreams];
  void* step;  // address of the tensor's step count; null: steps are not counted
  int64_t numel;
  uint32_t id;          // part of the key of the tensor's random bits
  bool step_is_double;  // false: the step count is a float
  uint8_t group;        // index of its numbers in StepConfig
};

FLATOUT_HD uint32_t chunks_of(int64_t numel) { return static_cast<uint32_t>((numel + kChunk - 1) / kChunk); }

// Returns the tensor that owns `chunk`: the last tensor whose first chunk is <= `chunk`. An empty tensor owns
// no chunk, because the next tensor (or the end of the list) has the same first chunk.
FLATOUT_HD uint32_t tensor_of(const uint32_t* first_chunk, uint32_t tensors, uint32_t chunk) {
  uint32_t low = 0, high = tensors;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (first_chunk[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Returns the first chunk of each tensor, then the number of all chunks.
inline std::vector<uint32_t> first_chunks(const std::vector<FlatTensor>& list) {
  std::vector<uint32_t> first(list.size() + 1);
  for (std::size_t t = 0; t < list.size(); ++t) first[t + 1] = first[t] + chunks_of(list[t].numel);
  return first;
}

// A chunk as [head | vectors | tail]. The head holds the single elements before the first 16-byte boundary.
// The tail holds the single elements after the last whole vector of `width` elements.
struct Split {
  uint32_t head;     // elements before the first vector
  uint32_t vectors;  // number of whole vectors
  uint32_t count;    // elements in the chunk
};

FLATOUT_HD Split split_chunk(const void* first, uint32_t element_size, uint32_t width, uint32_t count) {
  const uint32_t misaligned = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first) % kVectorBytes);
  uint32_t head = misaligned == 0 ? 0 : (kVectorBytes - misaligned) / element_size;
  if (misaligned % element_size != 0 || head > count) head = count;  // no element begins at a boundary
  return {head, (count - head) / width, count};
}

// Number of vectors that a thread loads from each stream before it stores the first one. With few streams, a
// single vector per stream does not keep enough loads in flight for the full memory bandwidth. The compiler
// cannot reorder this, because it may not move a load before a store.
template <int Streams>
inline constexpr int kBatch = Streams < 3 ? 4 / Streams : 1;

// Visits the share of one thread out of `threads`. Calls single(i) for each element of the head and the tail.
// Calls vectors(std::integral_constant<int, N>, i, stride) for N vectors of Width elements at i, i + stride,
// ... N is Batch, then 1 for the remaining vectors.
template <int Width, int Batch, class Single, class Vectors>
FLATOUT_HD void for_each_vector(const Split& split, uint32_t thread, uint32_t threads, const Single& single,
                                const Vectors& vectors) {
  for (uint32_t i = thread; i < split.head; i += threads) single(i);
  uint32_t v = thread;
#ifdef __CUDA_ARCH__
#pragma unroll 1  // a batch is unrolled already: more would cost registers and lower occupancy
#endif
  for (; v + (Batch - 1) * threads < split.vectors; v += Batch * threads)
    vectors(std::integral_constant<int, Batch>{}, split.head + v * Width, threads * Width);
  if constexpr (Batch > 1)
    for (; v < split.vectors; v += threads)
      vectors(std::integral_constant<int, 1>{}, split.head + v * Width, 0u);
  for (uint32_t i = split.head + split.vectors * Width + thread; i < split.count; i += threads) single(i);
}

template <class T>
struct alignas(kVectorBytes) Pack {
  static constexpr int kWidth = kVectorBytes / sizeof(T);
  T lane[kWidth];
};

}  // namespace flatout
