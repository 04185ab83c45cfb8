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
inline constexpr int kMaxStreams = 7;  // weight, gradient, three states, average, 16-bit companion

// One tensor and its companions of equal numel, as flat arrays.
struct FlatTensor {
  void* address[kMaxStreams] = {};
  float* step = nullptr;  // its step count, where the rule has one
  int64_t numel = 0;
  uint32_t id = 0;  // keys its random bits
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

// What one launch works on. Passed by value as a kernel argument (at most 32,764 bytes, CUDA >= 12.1): as
// many tensors as fit beside the other arguments, for which 512 bytes are kept.
template <int Streams, bool Steps = false, bool Ids = false,
          int Capacity = (32764 - 512) / (Streams * 8 + Steps * 8 + Ids * 4 + 4 + 2)>
struct TensorTable {
  static constexpr int kStreams = Streams;
  static constexpr int kCapacity = Capacity;
  void* address[Streams][Capacity];
  float* step[Steps ? Capacity : 1];
  uint32_t id[Ids ? Capacity : 1];
  uint32_t first_chunk[Capacity + 1];
  uint16_t tail[Capacity];  // elements in the tensor's last chunk
  uint32_t tensors;

  FLATOUT_HD uint32_t chunks() const { return first_chunk[tensors]; }

  void add(const FlatTensor& tensor, uint32_t chunks) {
    const uint32_t slot = tensors++;
    for (int s = 0; s < Streams; ++s) address[s][slot] = tensor.address[s];
    if constexpr (Steps) step[slot] = tensor.step;
    if constexpr (Ids) id[slot] = tensor.id;
    tail[slot] = static_cast<uint16_t>(chunks == 0 ? 0 : tensor.numel - int64_t{chunks - 1} * kChunk);
    first_chunk[tensors] = first_chunk[slot] + chunks;
  }
};

// Calls launch(table) for as many full tables as the tensors need.
template <class Table, class Launch>
void for_each_table(const std::vector<FlatTensor>& list, const Launch& launch) {
  constexpr uint32_t kMostChunks = 1u << 30;  // a grid has fewer than 2^31 blocks
  Table table{};
  for (const FlatTensor& tensor : list) {
    const uint32_t chunks = chunks_of(tensor.numel);
    if (table.tensors == Table::kCapacity || table.chunks() + chunks > kMostChunks) {
      launch(table);
      table.tensors = 0;
    }
    table.add(tensor, chunks);
  }
  if (table.tensors != 0) launch(table);
}

// Where a chunk lies: elements [begin, begin + count) of a tensor.
struct Place {
  uint32_t tensor;
  uint32_t count;
  int64_t begin;
};

template <class Table>
FLATOUT_HD Place locate(const Table& table, uint32_t chunk) {
  const uint32_t tensor = tensor_of(table.first_chunk, table.tensors, chunk);
  const bool last = chunk + 1 == table.first_chunk[tensor + 1];
  return {tensor, last ? table.tail[tensor] : kChunk, int64_t{chunk - table.first_chunk[tensor]} * kChunk};
}

// A chunk as [head | vectors | tail]: single elements up to the first 16-byte boundary, whole vectors of
// `width` elements, the rest.
struct Split {
  uint32_t head;     // elements before the first vector
  uint32_t vectors;  // number of whole vectors
  uint32_t count;    // elements in the chunk
};

FLATOUT_HD Split split_chunk(const void* first, uint32_t element_size, uint32_t width, uint32_t count) {
  const uint32_t misaligned = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first) % kVectorBytes);
  uint32_t head = misaligned == 0 ? 0 : (kVectorBytes - misaligned) / element_size;
  if (misaligned % element_size != 0 || head > count) head = count;  // no element ever meets the boundary
  return {head, (count - head) / width, count};
}

// How many vectors a thread loads before it stores one: a compiler cannot move loads over stores, and a
// thread with few streams would otherwise have too few bytes under way to keep up with memory.
template <int Streams>
inline constexpr int kBatch = Streams < 3 ? 4 / Streams : 1;

// The share of one thread out of `threads`: single(i) for its elements; for its vectors of Width elements,
// Batch at a time, vectors(std::integral_constant<int, N>, i, stride): N of them, at i, i + stride, ...
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

// A chunk of streams that all hold Ts, as pointers to its first element.
template <class T, int Streams>
struct ChunkView {
  T* stream[Streams];
  uint32_t count;
  uint32_t tensor;
};

template <class T, class Table>
FLATOUT_HD ChunkView<T, Table::kStreams> view_chunk(const Table& table, uint32_t chunk) {
  const Place place = locate(table, chunk);
  ChunkView<T, Table::kStreams> view;
  view.tensor = place.tensor;
  view.count = place.count;
  for (int s = 0; s < Table::kStreams; ++s)
    view.stream[s] = static_cast<T*>(table.address[s][place.tensor]) + place.begin;
  return view;
}

template <class T>
struct alignas(kVectorBytes) Pack {
  static constexpr int kWidth = kVectorBytes / sizeof(T);
  T lane[kWidth];
};

}  // namespace flatout
