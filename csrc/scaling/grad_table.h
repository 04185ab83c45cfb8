// grad_table.h: the gradients of a launch, and the chunk of a block among them.
#pragma once

#include "core/chunks.h"

namespace flatout {

// Gradients of one dtype, passed by value as a kernel argument. The capacity leaves 512 bytes for the other
// arguments.
template <int Capacity = (kArgumentBytes - 512) / (8 + 4 + 2)>
struct GradTable {
  static constexpr int kCapacity = Capacity;
  void* address[Capacity];
  uint32_t first_chunk[Capacity + 1];
  uint16_t tail[Capacity];  // elements in the tensor's last chunk
  uint32_t tensors;

  FLATOUT_HD uint32_t chunks() const { return first_chunk[tensors]; }

  void add(const FlatTensor& tensor) {
    const uint32_t slot = tensors++, chunks = chunks_of(tensor.numel);
    address[slot] = tensor.address[0];
    tail[slot] = static_cast<uint16_t>(chunks == 0 ? 0 : tensor.numel - int64_t{chunks - 1} * kChunk);
    first_chunk[tensors] = first_chunk[slot] + chunks;
  }
};

// Calls launch(table) for as many tables as the tensors need. All tables but the last one are full.
template <class Table, class Launch>
void for_each_table(const std::vector<FlatTensor>& list, const Launch& launch) {
  Table table{};
  for (const FlatTensor& tensor : list) {
    if (table.tensors == Table::kCapacity) {
      launch(table);
      table.tensors = 0;
    }
    table.add(tensor);
  }
  if (table.tensors != 0) launch(table);
}

// A chunk of gradients.
template <class T>
struct ChunkView {
  T* gradients;
  uint32_t count;
};

template <class T, class Table>
FLATOUT_HD ChunkView<T> view_chunk(const Table& table, uint32_t chunk) {
  const uint32_t tensor = tensor_of(table.first_chunk, table.tensors, chunk);
  const bool last = chunk + 1 == table.first_chunk[tensor + 1];
  return {static_cast<T*>(table.address[tensor]) + int64_t{chunk - table.first_chunk[tensor]} * kChunk,
          last ? table.tail[tensor] : kChunk};
}

}  // namespace flatout
