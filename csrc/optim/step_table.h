// step_table.h: the addresses of a step's tensors on a device. A table in device memory holds the addresses
// that stay the same. Gradients change from step to step and are an argument of the launch.
#pragma once

#include "core/chunks.h"

namespace flatout {

struct StepTable {
  uint32_t* ticket;  // blocks of a launch that are done; 0 between launches
  const FlatTensor* tensor;
  const uint32_t* first_chunk;  // of each tensor, then the number of chunks
};

// Returns the table of tensors, as bytes of device memory: ticket, tensors, first chunks.
inline std::vector<char> table_image(const std::vector<FlatTensor>& tensors) {
  const std::vector<uint32_t> first = first_chunks(tensors);
  const std::size_t tensor_bytes = tensors.size() * sizeof(FlatTensor),
                    first_bytes = first.size() * sizeof(uint32_t);
  std::vector<char> image(kVectorBytes + tensor_bytes + first_bytes);
  memcpy(image.data() + kVectorBytes, tensors.data(), tensor_bytes);
  memcpy(image.data() + kVectorBytes + tensor_bytes, first.data(), first_bytes);
  return image;
}
inline StepTable table_at(void* image, std::size_t tensors) {
  char* first_tensor = static_cast<char*>(image) + kVectorBytes;
  return {static_cast<uint32_t*>(image), reinterpret_cast<const FlatTensor*>(first_tensor),
          reinterpret_cast<const uint32_t*>(first_tensor + tensors * sizeof(FlatTensor))};
}

// The tensors of one launch. Addresses of their gradients are kernel arguments, which limits the number of
// tensors. 3 KiB are left for other arguments.
template <int Capacity = (kArgumentBytes - 3072) / 8>
struct StepBatch {
  static constexpr uint32_t kCapacity = Capacity;
  void* gradient[Capacity];
  uint32_t first_tensor, tensors;
  uint32_t first_chunk, chunks;
};

// Calls launch(batch) for as many batches as the tensors need.
template <class Batch, class Launch>
void for_each_batch(const std::vector<FlatTensor>& tensors, const Launch& launch) {
  const auto count = static_cast<uint32_t>(tensors.size());
  Batch batch{};
  for (uint32_t first = 0; first < count; first += batch.tensors) {
    batch.first_tensor = first;
    batch.tensors = count - first < Batch::kCapacity ? count - first : Batch::kCapacity;
    batch.first_chunk += batch.chunks;
    batch.chunks = 0;
    for (uint32_t t = 0; t < batch.tensors; ++t) {
      batch.gradient[t] = tensors[first + t].address[1];
      batch.chunks += chunks_of(tensors[first + t].numel);
    }
    launch(batch);
  }
}

// One block's work: elements [begin, begin + count) of a tensor.
struct Place {
  FlatTensor tensor;
  uint32_t count;
  int64_t begin;
};

// Returns the chunk of a block. The last chunks of a batch come first. The check has read their gradients
// last, so L2 may still hold these gradients.
template <class Batch>
FLATOUT_HD uint32_t chunk_of(const Batch& batch, uint32_t block) {
  return batch.first_chunk + batch.chunks - 1 - block;
}

// Finds the place of a chunk of the batch's tensor `t`.
template <class Batch>
FLATOUT_HD void find_place(Place& place, const StepTable& table, const Batch& batch, uint32_t t,
                           uint32_t chunk) {
  const FlatTensor& tensor = table.tensor[batch.first_tensor + t];
  place.tensor = tensor;
  place.tensor.address[1] = batch.gradient[t];
  place.begin = int64_t{chunk - table.first_chunk[batch.first_tensor + t]} * kChunk;
  const int64_t rest = tensor.numel - place.begin;
  place.count = rest < kChunk ? static_cast<uint32_t>(rest) : kChunk;
}

}  // namespace flatout
