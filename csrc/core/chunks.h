// chunks.h: cuts lists of tensors into chunks and chunks into aligned vectors. Every index that a kernel uses
// is computed here by functions that the host can call too, so that a test can play blocks and threads over
// them.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "core/scalar.h"

namespace flatout {

// Elements per chunk: one CUDA block's work, and the unit of the norm's partial sums. A constant, so that
// sums do not depend on the number of threads; a multiple of every vector width, so that all chunks of a
// tensor share its misalignment.
inline constexpr uint32_t kChunk = 16384;
inline constexpr int kVectorBytes = 16;
inline constexpr int kMaxStreams = 5;  // p, g, exp_avg, exp_avg_sq, max_exp_avg_sq

// One tensor and its companions of equal numel and dtype, as flat arrays.
struct FlatTensor {
  void* address[kMaxStreams] = {};
  float* step = nullptr;  // its step count, where the rule has one
  int64_t numel = 0;
};

FLATOUT_HD uint32_t chunks_of(int64_t numel) { return static_cast<uint32_t>((numel + kChunk - 1) / kChunk); }

// The tensor that owns `chunk`: the last one whose first chunk is <= chunk. Empty tensors own none, wherever
// they stand, because the tensor after them (or the end) has the same first chunk.
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

// What one launch works on. Passed by value as a kernel argument (at most 32,764 bytes, CUDA >= 12.1).
template <int Streams, int Capacity>
struct TensorTable {
  static constexpr int kStreams = Streams;
  static constexpr int kCapacity = Capacity;
  void* address[Streams][Capacity];
  float* step[Capacity];
  uint32_t numel[Capacity];  // tensors beyond 2^31 elements are entered as several
  uint32_t first_chunk[Capacity + 1];
  uint32_t tensors;
};

// As many tensors as fit beside the other kernel arguments (512 bytes are kept for those).
template <int Streams>
inline constexpr int kTableCapacity = (32764 - 512) / ((Streams + 1) * 8 + 8);

// Calls launch(table) for as many full tables as the tensors need; `piece` (a multiple of kChunk) is where
// very large tensors are split.
template <class Table, class Launch>
void for_each_table(const std::vector<FlatTensor>& list, size_t element_size, const Launch& launch,
                    int64_t piece = int64_t{1} << 31) {
  Table table;
  table.tensors = 0;
  uint32_t chunks = 0;
  const auto flush = [&] {
    if (table.tensors == 0) return;
    table.first_chunk[table.tensors] = chunks;
    launch(table, chunks);
    table.tensors = 0;
    chunks = 0;
  };
  for (const FlatTensor& tensor : list) {
    for (int64_t begin = 0; begin < tensor.numel; begin += piece) {
      const int64_t numel = tensor.numel - begin < piece ? tensor.numel - begin : piece;
      if (table.tensors == Table::kCapacity || chunks > (1u << 30)) flush();
      const uint32_t slot = table.tensors++;
      for (int s = 0; s < Table::kStreams; ++s)
        table.address[s][slot] = static_cast<char*>(tensor.address[s]) + begin * element_size;
      table.step[slot] = tensor.step;
      table.numel[slot] = static_cast<uint32_t>(numel);
      table.first_chunk[slot] = chunks;
      chunks += chunks_of(numel);
    }
  }
  flush();
}

// A chunk as [head | vectors | tail]: single elements up to the first 16-byte boundary, whole vectors, the
// rest. When the streams are misaligned differently no boundary serves all of them, and everything is head.
struct Split {
  uint32_t head;     // elements before the first vector
  uint32_t vectors;  // number of whole vectors
  uint32_t count;    // elements in the chunk
};

template <class T, int Streams>
FLATOUT_HD Split split_chunk(T* const (&stream)[Streams], uint32_t count) {
  constexpr uint32_t kWidth = kVectorBytes / sizeof(T);
  const uintptr_t misaligned = reinterpret_cast<uintptr_t>(stream[0]) % kVectorBytes;
  bool together = misaligned % sizeof(T) == 0;
  for (int s = 1; s < Streams; ++s)
    together = together && reinterpret_cast<uintptr_t>(stream[s]) % kVectorBytes == misaligned;
  uint32_t head = misaligned == 0 ? 0 : static_cast<uint32_t>((kVectorBytes - misaligned) / sizeof(T));
  if (!together || head > count) head = count;
  return {head, (count - head) / kWidth, count};
}

// How many vectors a thread loads before it stores one: a compiler cannot move loads over stores, and a
// thread with few streams would otherwise have too few bytes under way to keep up with memory.
template <int Streams>
inline constexpr int kBatch = Streams < 3 ? 4 / Streams : 1;

// The share of one thread out of `threads`: single(i) for its elements; for its vectors, Batch at a time,
// vectors(std::integral_constant<int, N>, i, stride): N of them, at i, i + stride, ...
template <int Width, int Batch, class Single, class Vectors>
FLATOUT_HD void walk(const Split& split, uint32_t thread, uint32_t threads, const Single& single,
                     const Vectors& vectors) {
  for (uint32_t i = thread; i < split.head; i += threads) single(i);
  uint32_t v = thread;
#ifdef __CUDA_ARCH__
#pragma unroll 1  // batches are the unrolling: more of it costs registers, and with them threads
#endif
  for (; v + (Batch - 1) * threads < split.vectors; v += Batch * threads)
    vectors(std::integral_constant<int, Batch>{}, split.head + v * Width, threads * Width);
  if constexpr (Batch > 1)
    for (; v < split.vectors; v += threads)
      vectors(std::integral_constant<int, 1>{}, split.head + v * Width, 0u);
  for (uint32_t i = split.head + split.vectors * Width + thread; i < split.count; i += threads) single(i);
}

// A chunk's streams, as pointers to its first element.
template <class T, int Streams>
struct ChunkView {
  T* stream[Streams];
  uint32_t count;
  uint32_t tensor;
};

template <class T, class Table>
FLATOUT_HD ChunkView<T, Table::kStreams> view_chunk(const Table& table, uint32_t chunk) {
  ChunkView<T, Table::kStreams> view;
  view.tensor = tensor_of(table.first_chunk, table.tensors, chunk);
  const uint32_t begin = (chunk - table.first_chunk[view.tensor]) * kChunk;
  const uint32_t left = table.numel[view.tensor] - begin;
  view.count = left < kChunk ? left : kChunk;
  for (int s = 0; s < Table::kStreams; ++s)
    view.stream[s] = static_cast<T*>(table.address[s][view.tensor]) + begin;
  return view;
}

template <class T>
struct alignas(kVectorBytes) Pack {
  static constexpr int kWidth = kVectorBytes / sizeof(T);
  T lane[kWidth];
};

}  // namespace flatout
