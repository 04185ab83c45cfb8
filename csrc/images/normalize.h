// normalize.h: the arithmetic of image normalization, written once for the CPU loops and the CUDA kernels.
//
// A value is (x / 255 - mean) / std in float32, each of the three operations rounded, and then rounded to the
// output's dtype. The bits are those of torchvision's ToTensor and Normalize on a CPU. Both divisions are
// products with a reciprocal in two floats:
//   x / 255: correctly rounded for all 256 values.
//   y / std: the error is below 2^-47, so the result is one of the two floats next to the quotient. 135 of
//   768 million results were the farther float. One correction by the remainder gives the nearer float
//   (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).
//
// The memory of an H200 allows 7 elements per clock and SM. On this GPU, these 8 operations per element take
// 56 of the 128 operations that an SM has per clock. A table of the 256 values would be in shared memory,
// which delivers at most 32 lanes per clock. With the bank conflicts of random values, shared memory delivers
// about 9. On one EPYC core with AVX-512, for images in cache, these operations compute 7.4 elements per
// nanosecond. Divisions compute 4.8, and a table 2.0.
#pragma once

#include <cmath>

#include "core/chunks.h"

namespace flatout {

// Constants of one channel. std is between 1e-18 and 1e18, and |mean| is 0 or in the same range. So no result
// is subnormal or overflows.
struct Channel {
  float mean, std;
  float inverse, rest;  // together 1 / std; `inverse` is correctly rounded

  static Channel of(double mean, double std) {
    const auto divisor = static_cast<float>(std);
    const float inverse = 1.0f / divisor;
    return {static_cast<float>(mean), divisor, inverse,
            static_cast<float>(1 / static_cast<double>(divisor) - static_cast<double>(inverse))};
  }
};

// `x` is a whole number from 0 to 255.
FLATOUT_HD float normalize(float x, const Channel& channel) {
  constexpr float kInverse = 1.0f / 255,
                  kRest = static_cast<float>(1.0 / 255 - static_cast<double>(kInverse));
  const float unit = fused_multiply_add(x, kInverse, x * kRest);
  const float centred = unit - channel.mean;
  const float near = fused_multiply_add(centred, channel.inverse, centred * channel.rest);
  const float remainder = fused_multiply_add(-channel.std, near, centred);  // exact
  return fused_multiply_add(remainder, channel.inverse, near);
}

// Order of an image's elements in memory: [C, H, W] (contiguous) or [H, W, C] (channels_last).
enum class Order : uint8_t { kPlanar, kInterleaved };

// Dense images of one shape. With one channel or one pixel, both orders are the same, and the fields are
// kInterleaved.
struct ImageBatch {
  const uint8_t* in;
  void* out;
  int64_t images, channels, pixels;  // [N, C, H * W]
  Order in_order, out_order;

  FLATOUT_HD int64_t elements() const { return images * channels * pixels; }
};

}  // namespace flatout
