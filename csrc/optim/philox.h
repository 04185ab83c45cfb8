// philox.h: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the
// counter-based generator of torch and cuRAND. An element has the same bits in every thread.
#pragma once

#include <cstdint>

#include "core/scalar.h"

namespace flatout {

// Key of random bits. Equal keys give equal bits.
struct RandomKey {
  uint64_t seed;
  uint32_t stream, tensor, step;
};

inline constexpr uint32_t kGroup = 8;  // elements per call, 16 bits each

struct Philox {
  uint32_t word[4];

  // Returns the bits of element `j` (0 to 7) of the group. Comparisons choose the word, because an index at
  // run time would cost stack memory.
  FLATOUT_HD uint16_t bits(uint32_t j) const {
    const uint32_t pair = j < 4 ? (j < 2 ? word[0] : word[1]) : (j < 6 ? word[2] : word[3]);
    return static_cast<uint16_t>(pair >> (j % 2 * 16));
  }
};

FLATOUT_HD Philox philox(const RandomKey& key, uint32_t group) {
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  uint32_t c0 = group, c1 = key.stream, c2 = key.tensor, c3 = key.step;
#ifndef __CUDACC__
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t even = uint64_t{0xD2511F53} * c0, odd = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(odd >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(odd);
    c2 = static_cast<uint32_t>(even >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(even);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace flatout
