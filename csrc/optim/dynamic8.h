// dynamic8.h: numbers in 8 bits, by the block-wise dynamic quantization of Dettmers et al., "8-bit Optimizers
// via Block-wise Quantization" (ICLR 2022). A block's absmax is the largest magnitude among its numbers. Each
// number is stored as a multiple of the absmax, rounded to the nearest of 256 multiples from -1 (or 0) to 1.
// For host and device.
//
// Decade e of the map covers the magnitudes (0.1, 1] x 10^(e - 6) with 2^e bins of equal width. A bin stands
// for its middle. Numbers with a sign use the decades 0 to 6. Numbers without a sign use the decades 1 to 7,
// at a tenth of the magnitude. Both maps also have 0 and 1, but not -1. Codes are positions in ascending
// order, as in bitsandbytes.
//
// Bins are numbered through all decades: bin 2^e + j is the bin j of decade e. The leading bit of a bin's
// number gives the decade. The middle of a bin is (18 bin - 16 2^e + 9) 5^e x 5e-8. All terms are products
// and sums of integers, so a number has the same code on any device, with or without fused multiply-adds.
#pragma once

#include "core/scalar.h"

namespace flatout {

inline constexpr uint32_t kDynamicBlock = 256;  // elements with one absmax

// The absmax of a block, and its inverse for encoding.
struct DynamicScale {
  float absmax, inverse;

  // `largest`: the bits of the greatest magnitude. The bits of NaN are greater than the bits of infinity. All
  // numbers of a block with NaN or infinity decode to NaN. An absmax is 0 or at least 2^-100, so that its
  // least multiple is a normal number.
  FLATOUT_HD static DynamicScale of(uint32_t largest) {
    if (largest >= 0x7F800000u) largest = 0x7FC00000u;
    if (largest != 0 && largest < 0x0D800000u) largest = 0x0D800000u;
    const float absmax = detail::bit_cast<float>(largest);
    return {absmax, largest == 0 ? 0.0f : 1.0f / absmax};
  }
};

FLATOUT_HD uint32_t magnitude_bits(float value) { return detail::bit_cast<uint32_t>(value) & 0x7FFFFFFFu; }

template <bool Signed>
struct Dynamic8 {
  static constexpr int kFirst = Signed ? 0 : 1, kLast = kFirst + 6;  // decades
  static constexpr int kOne = 2 << kLast;                            // the bin after the last one: 1
  static constexpr double kUnit = Signed ? 1 : 0.1;

  // Returns the code of the nearest number. Ties, up to the rounding of one product, round away from 0.
  // Without a sign, no positive number becomes 0, because a second moment of 0 would make an update explode.
  FLATOUT_HD static uint8_t encode(float value, float inverse) {
    const float ratio = value * inverse;
    const uint32_t bits = magnitude_bits(ratio);
    const float magnitude = detail::bit_cast<float>(bits < 0x3F800000u ? bits : 0x3F800000u);  // of NaN: 1
    float scale = kScale<kFirst>, bins = 1 << kFirst;
    find_decade<kFirst + 1>(magnitude, scale, bins);
    // Scaled so that a decade goes from `bins` to 10 `bins`, and each of its bins is 9 wide. A place
    // after the last bin that is not nearer to the next decade belongs to the last bin.
    const float place = static_cast<float>(static_cast<int>(magnitude * scale)), last = 10 * bins - 1;
    int bin = static_cast<int>(((place < last ? place : last) + 8 * bins) * kNinth);
    bin += ratio >= kNearOne ? 1 : 0;
    if constexpr (Signed) {
      bin = magnitude < kNearZero ? 0 : bin;
      return static_cast<uint8_t>(127 + (ratio < 0 ? -bin : bin));
    } else {
      const int least = value > 0 ? 2 : 1;
      return static_cast<uint8_t>((bin < least ? least : bin) - 1);
    }
  }

  FLATOUT_HD static float decode(uint8_t code, float absmax) {
    const int offset = Signed ? code - 127 : code + 1;
    const int bin = offset < 0 ? -offset : offset;
    const float twice = static_cast<float>(2 * bin);
    const uint32_t bits = detail::bit_cast<uint32_t>(twice);  // the exponent's lowest three bits: the decade
    const float twice_bins = detail::bit_cast<float>(bits & 0x7F800000u);
    constexpr float kLeast = Signed ? 5e-8f : 5e-9f;
    float multiple = (9 * twice - 8 * twice_bins + 9) * ((bits >> 23 & 1u) != 0 ? 5.0f : 1.0f) *
                     ((bits >> 24 & 1u) != 0 ? 25.0f : 1.0f) *
                     ((bits >> 25 & 1u) != 0 ? 625.0f * kLeast : kLeast);
    if (bin == kFirst) multiple = 0;
    if (bin == kOne) multiple = 1;
    return (offset < 0 ? -multiple : multiple) * absmax;
  }

 private:
  FLATOUT_HD static constexpr double power(double base, int exponent) {
    return exponent == 0 ? 1 : base * power(base, exponent - 1);
  }
  // The least number that is nearer to the decade's first middle than to the last middle of the decade below.
  template <int Decade>
  static constexpr float kBegin =
      static_cast<float>((1 + 0.9 / (1 << (Decade - 1))) * power(10, Decade) * 1e-7 * kUnit);
  template <int Decade>
  static constexpr float kScale = static_cast<float>((Signed ? 1e7 : 1e8) / power(5, Decade));  // exact
  static constexpr float kNearOne = static_cast<float>(1 - 0.225 / (1 << kLast));
  static constexpr float kNearZero = 0.275e-6f;
  static constexpr float kNinth = 0x1.c71c74p-4f;  // 1 / 9, rounded up for multiples of 9

  // All values are floats. For integers, compilers would emit one selection for each multiple.
  template <int Decade>
  FLATOUT_HD static void find_decade(float magnitude, float& scale, float& bins) {
    if constexpr (Decade <= kLast) {
      const bool there = magnitude >= kBegin<Decade>;
      scale = there ? kScale<Decade> : scale;
      bins = there ? static_cast<float>(1 << Decade) : bins;
      find_decade<Decade + 1>(magnitude, scale, bins);
    }
  }
};

// Calls body(first element, number of elements, block) for each block of `count` numbers.
template <class Body>
FLATOUT_HD void for_each_dynamic_block(uint32_t count, const Body& body) {
  for (uint32_t begin = 0; begin < count; begin += kDynamicBlock)
    body(begin, count - begin < kDynamicBlock ? count - begin : kDynamicBlock, begin / kDynamicBlock);
}

template <bool Signed>
FLATOUT_HD void decode_block(const uint8_t* __restrict codes, float absmax, float* __restrict to,
                             uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) to[i] = Dynamic8<Signed>::decode(codes[i], absmax);
}

// Returns the block's absmax.
template <bool Signed>
FLATOUT_HD float encode_block(const float* __restrict from, uint8_t* __restrict codes, uint32_t count) {
  uint32_t largest = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t bits = magnitude_bits(from[i]);
    largest = bits > largest ? bits : largest;
  }
  const DynamicScale scale = DynamicScale::of(largest);
  for (uint32_t i = 0; i < count; ++i) codes[i] = Dynamic8<Signed>::encode(from[i], scale.inverse);
  return scale.absmax;
}

template <bool Signed>
FLATOUT_HD void decode_blocks(const uint8_t* codes, const float* absmax, float* to, uint32_t count) {
  for_each_dynamic_block(count, [&](uint32_t begin, uint32_t n, uint32_t block) {
    decode_block<Signed>(codes + begin, absmax[block], to + begin, n);
  });
}
template <bool Signed>
FLATOUT_HD void encode_blocks(const float* from, uint8_t* codes, float* absmax, uint32_t count) {
  for_each_dynamic_block(count, [&](uint32_t begin, uint32_t n, uint32_t block) {
    absmax[block] = encode_block<Signed>(from + begin, codes + begin, n);
  });
}

}  // namespace flatout
