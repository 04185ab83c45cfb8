// scalar.h: the dtypes of the update path, and the type in which each is computed. For host and device,
// without torch.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define FLATOUT_HD __host__ __device__ __forceinline__
#else
// always_inline, so that a loop compiled for AVX2 never calls a copy that was compiled for the baseline.
#define FLATOUT_HD [[gnu::always_inline]] inline
#endif

// Unrolls the next loop in code for a GPU.
#ifdef __CUDA_ARCH__
#define FLATOUT_UNROLL _Pragma("unroll")
#else
#define FLATOUT_UNROLL
#endif

namespace flatout {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

namespace detail {

template <class To, class From>
FLATOUT_HD To bit_cast(From from) {
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Both conversions of half are branch-free (Maratyszcza/FP16), so that compilers vectorize loops over them.
FLATOUT_HD float half_to_float(uint16_t half) {
  const uint32_t word = static_cast<uint32_t>(half) << 16;
  const uint32_t sign = word & 0x80000000u;
  const uint32_t twice = word + word;
  const float normal = bit_cast<float>((twice >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
  const float subnormal = bit_cast<float>((twice >> 17) | (126u << 23)) - 0.5f;
  const uint32_t magnitude = twice < (1u << 27) ? bit_cast<uint32_t>(subnormal) : bit_cast<uint32_t>(normal);
  return bit_cast<float>(sign | magnitude);
}

FLATOUT_HD uint16_t float_to_half(float value) {
  const uint32_t word = bit_cast<uint32_t>(value);
  const uint32_t twice = word + word;
  const float magnitude = bit_cast<float>(word & 0x7FFFFFFFu);
  float base = (magnitude * 0x1.0p+112f) * 0x1.0p-110f;  // overflows to infinity if a half does
  const uint32_t exponent = twice & 0xFF000000u;
  const uint32_t bias = exponent < 0x71000000u ? 0x71000000u : exponent;
  base = bit_cast<float>((bias >> 1) + 0x07800000u) + base;  // rounds to nearest even at half's last bit
  const uint32_t rounded = bit_cast<uint32_t>(base);
  const uint32_t finite = ((rounded >> 13) & 0x00007C00u) + (rounded & 0x00000FFFu);
  return static_cast<uint16_t>(((word & 0x80000000u) >> 16) | (twice > 0xFF000000u ? 0x7E00u : finite));
}

FLATOUT_HD uint16_t bfloat_from_sum(float value, uint32_t added) {
  const uint32_t word = bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((word & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : (word + added) >> 16);
}

FLATOUT_HD uint16_t float_to_bfloat(float value) {
  return bfloat_from_sum(value, 0x7FFFu + ((bit_cast<uint32_t>(value) >> 16) & 1u));  // to nearest even
}

}  // namespace detail

FLATOUT_HD float load(float value) { return value; }
FLATOUT_HD double load(double value) { return value; }
FLATOUT_HD float load(bf16 value) { return detail::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }
FLATOUT_HD float load(f16 value) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(value.bits));
#else
  return detail::half_to_float(value.bits);
#endif
}

FLATOUT_HD void store(float& to, float value) { to = value; }
FLATOUT_HD void store(double& to, double value) { to = value; }
FLATOUT_HD void store(bf16& to, float value) {
#ifdef __CUDA_ARCH__
  to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
  to.bits = detail::float_to_bfloat(value);
#endif
}
FLATOUT_HD void store(f16& to, float value) {
#ifdef __CUDA_ARCH__
  to.bits = __half_as_ushort(__float2half_rn(value));
#else
  to.bits = detail::float_to_half(value);
#endif
}

// Rounds stochastically. The probability of rounding away from 0 is the fraction that is cut off. `random` is
// uniform over 16 bits.
FLATOUT_HD void store_stochastic(bf16& to, float value, uint16_t random) {
  to.bits = detail::bfloat_from_sum(value, random);
}

// `join` and `split` convert a pair of a bfloat16 and a 16-bit remainder to a float32 weight, and back. The
// bfloat16 is the weight rounded to nearest, ties away from 0. The remainder is the signed distance to the
// weight. The pair holds the weight exactly, in 4 bytes. A bfloat16 and a float32 master would take 6 bytes.
FLATOUT_HD float join(bf16 high, int16_t remainder) {
  const uint32_t upper = static_cast<uint32_t>(high.bits) << 16;
  const float weight = detail::bit_cast<float>(upper + static_cast<uint32_t>(int32_t{remainder}));
  // Other code may have written a zero or an infinity over the parameter. Together with some remainders, such
  // a value makes NaN.
  const float written = detail::bit_cast<float>(upper);
  return weight == weight ? weight : written;
}
FLATOUT_HD void split(float value, bf16& high, int16_t& remainder) {
  uint32_t word = detail::bit_cast<uint32_t>(value);
  if ((word & 0x7FFFFFFFu) > 0x7F800000u) word = 0x7FC00000u;  // else the payload could carry into the sign
  high.bits = static_cast<uint16_t>((word + 0x8000u) >> 16);
  remainder = static_cast<int16_t>(word);
}

// a * b + c, rounded once. Compilers contract no other operations (-ffp-contract=off, -fmad=false), so a step
// has the same bits on CPUs and GPUs.
FLATOUT_HD float fused_multiply_add(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
FLATOUT_HD double fused_multiply_add(double a, double b, double c) {
#ifdef __CUDA_ARCH__
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

// Equals torch.lerp bit for bit. Starts at the nearer end, so that weights of 0 and 1 are exact.
template <class Acc>
FLATOUT_HD Acc interpolate(Acc from, Acc to, Acc weight) {
  const bool near = weight < Acc(0.5);
  return fused_multiply_add(near ? weight : weight - 1, to - from, near ? from : to);
}

// The type in which a dtype is computed: double for double, float for everything narrower.
template <class T>
struct Compute {
  using type = float;
};
template <>
struct Compute<double> {
  using type = double;
};
template <class T>
using compute_t = typename Compute<T>::type;

// A number that the host knows (`value`), or that lies on the tensors' device (`address`). The host never
// waits for the number.
struct DeviceScalar {
  const void* address = nullptr;
  bool is_double = false;
  double value = 0;

  FLATOUT_HD double get() const {
    if (address == nullptr) return value;
    return is_double ? *static_cast<const double*>(address)
                     : static_cast<double>(*static_cast<const float*>(address));
  }
};

}  // namespace flatout
