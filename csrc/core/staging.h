// staging.h: conversion of 16-bit elements to float and back, a block at a time. Loops compute on the floats
// in a buffer that stays in L1.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define FLATOUT_F16C 1
#endif

#include "core/scalar.h"

namespace flatout {

inline constexpr uint32_t kBlock = 512;  // elements; five streams of kBlock floats fit in L1

#ifdef FLATOUT_F16C
inline bool has_f16c() {
  static const bool found = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  return found;
}

// Called once per block, because an intrinsic cannot be inlined into code for a narrower target.
[[gnu::target("avx,f16c"), gnu::noinline]] inline void widen_f16c(const f16* from, float* to,
                                                                  uint32_t count) {
  uint32_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  for (; i < count; ++i) to[i] = _cvtsh_ss(from[i].bits);
}

[[gnu::target("avx,f16c"), gnu::noinline]] inline void narrow_f16c(const float* from, f16* to,
                                                                   uint32_t count) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;
  uint32_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), kNearest));
  for (; i < count; ++i) to[i].bits = _cvtss_sh(from[i], kNearest);
}
#endif

template <class T>
FLATOUT_HD void widen(const T* __restrict from, float* __restrict to, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) to[i] = load(from[i]);
}
template <class T>
FLATOUT_HD void narrow(const float* __restrict from, T* __restrict to, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) store(to[i], from[i]);
}
#ifdef FLATOUT_F16C
FLATOUT_HD void widen(const f16* __restrict from, float* __restrict to, uint32_t count) {
  if (has_f16c()) return widen_f16c(from, to, count);
  for (uint32_t i = 0; i < count; ++i) to[i] = load(from[i]);
}
FLATOUT_HD void narrow(const float* __restrict from, f16* __restrict to, uint32_t count) {
  if (has_f16c()) return narrow_f16c(from, to, count);
  for (uint32_t i = 0; i < count; ++i) store(to[i], from[i]);
}
#endif

}  // namespace flatout
