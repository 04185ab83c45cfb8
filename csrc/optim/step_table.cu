// step_table.cu: writes a table to the device.
#include <algorithm>

#include "optim/step_launch.h"

namespace flatout {
namespace {

struct Words {
  static constexpr std::size_t kCapacity = (kArgumentBytes - 64) / sizeof(uint32_t);
  uint32_t word[kCapacity];
};

__global__ void __launch_bounds__(kThreads)
    write_kernel(__grid_constant__ Argument<Words> words, uint32_t count, uint32_t* to) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = words.word[i];
}

}  // namespace

void launch_write(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  Words words{};
  for (std::size_t begin = 0; begin < bytes; begin += sizeof(words.word)) {
    const std::size_t piece = std::min(bytes - begin, sizeof(words.word));
    memcpy(words.word, static_cast<const char*>(from) + begin, piece);
    const auto count = static_cast<uint32_t>(piece / sizeof(uint32_t));
    // Lanes that read different words of a kernel argument wait for one another. One word per thread spreads
    // these reads over as many blocks as possible.
    const uint32_t blocks = (count + kThreads - 1) / kThreads;
    launch("write_kernel", write_kernel, blocks, kThreads, stream, words, count,
           reinterpret_cast<uint32_t*>(static_cast<char*>(to) + begin));
  }
}

}  // namespace flatout
