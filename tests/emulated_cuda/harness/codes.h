// codes.h: the table of the 256 numbers that codes stand for, by the definition in optim/dynamic8.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace harness {

// Returns the multiples of all codes, in ascending order. A decade (0.1, 1] x 10^k has 2^e bins, and a code
// stands for the middle of a bin.
inline std::vector<double> multiples_of_codes(bool has_sign) {
  std::vector<double> multiples{0, 1};
  for (int decade = 0; decade < 7; ++decade) {
    const int bins = 1 << (has_sign ? decade : decade + 1);
    for (int bin = 0; bin < bins; ++bin) {
      const double multiple = (0.1 + 0.9 * (bin + 0.5) / bins) * std::pow(10, decade - 6);
      multiples.push_back(multiple);
      if (has_sign) multiples.push_back(-multiple);
    }
  }
  std::sort(multiples.begin(), multiples.end());
  return multiples;
}

inline double multiple_of(unsigned code, bool has_sign) {
  static const std::vector<double> tables[] = {multiples_of_codes(false), multiples_of_codes(true)};
  return tables[has_sign ? 1 : 0][code];
}

// True if no other code is nearer to a ratio in [-1, 1]. A positive number without a sign never becomes 0.
inline bool is_nearest_code(unsigned code, double ratio, bool has_sign) {
  constexpr double kSlack = 1e-5;  // relative: ratios are computed in float
  const double distance = std::abs(multiple_of(code, has_sign) - ratio);
  const auto is_nearer = [&](unsigned other) {
    if (!has_sign && other == 0 && ratio > 0) return false;
    return std::abs(multiple_of(other, has_sign) - ratio) < distance - kSlack * std::abs(ratio);
  };
  return !(code > 0 && is_nearer(code - 1)) && !(code < 255 && is_nearer(code + 1)) &&
         !(!has_sign && ratio > 0 && code == 0);
}

}  // namespace harness
