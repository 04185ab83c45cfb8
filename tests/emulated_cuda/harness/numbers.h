// numbers.h: numbers of each dtype as double, converted without flatout's code, and random numbers.
#pragma once

#include <cmath>
#include <concepts>
#include <cstring>
#include <random>
#include <vector>

#include "core/scalar.h"

namespace harness {

using flatout::bf16;
using flatout::f16;

template <class T>
concept Number = std::floating_point<T> || std::same_as<T, f16> || std::same_as<T, bf16>;

inline double number_of(float value) { return value; }
inline double number_of(double value) { return value; }
inline double number_of(f16 value) {
  _Float16 half;
  std::memcpy(&half, &value, sizeof half);
  return static_cast<double>(half);
}
inline double number_of(bf16 value) {
  const uint32_t word = uint32_t{value.bits} << 16;
  float number;
  std::memcpy(&number, &word, sizeof number);
  return number;
}

// Bits of a dtype's significand, including the hidden bit.
template <class T>
inline constexpr int kDigits = 24;
template <>
inline constexpr int kDigits<double> = 53;
template <>
inline constexpr int kDigits<f16> = 11;
template <>
inline constexpr int kDigits<bf16> = 8;

// Returns the nearest number of a dtype, ties to even. For bf16, `number` must be neither subnormal nor too
// large.
template <class T>
T nearest(double number) {
  T value;
  if constexpr (std::is_same_v<T, f16>) {
    const auto half = static_cast<_Float16>(number);
    std::memcpy(&value, &half, sizeof half);
  } else if constexpr (std::is_same_v<T, bf16>) {
    int exponent = 0;
    if (std::isfinite(number))
      number = std::ldexp(std::nearbyint(std::ldexp(std::frexp(number, &exponent), 8)), -8);
    const auto rounded = static_cast<float>(std::ldexp(number, exponent));
    uint32_t word;
    std::memcpy(&word, &rounded, sizeof word);
    value.bits = static_cast<uint16_t>(word >> 16);
  } else {
    value = static_cast<T>(number);
  }
  return value;
}

// Greatest relative error of a number that was rounded once.
template <class T>
double rounding_error() {
  return std::ldexp(1, -kDigits<T>);
}

template <class T>
std::vector<T> random_numbers(int64_t count, double least, double most, std::mt19937& random) {
  std::uniform_real_distribution<double> uniform(least, most);
  std::vector<T> numbers(static_cast<std::size_t>(count));
  for (T& number : numbers) number = nearest<T>(uniform(random));
  return numbers;
}

template <class T>
inline constexpr const char* kName = "float32";
template <>
inline constexpr const char* kName<double> = "float64";
template <>
inline constexpr const char* kName<f16> = "float16";
template <>
inline constexpr const char* kName<bf16> = "bfloat16";

}  // namespace harness
