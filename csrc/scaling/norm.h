// norm.h: the arithmetic of unscale + check + norm, written once for the CPU loops and the CUDA kernels.
#pragma once

#include <cmath>
#include <type_traits>

#include "core/scalar.h"

namespace flatout {

enum class Norm { kOne, kTwo, kInf };

// Calls body with std::integral_constant<Norm, norm>.
template <class Body>
void with_norm(Norm norm, const Body& body) {
  switch (norm) {
    case Norm::kOne:
      return body(std::integral_constant<Norm, Norm::kOne>{});
    case Norm::kTwo:
      return body(std::integral_constant<Norm, Norm::kTwo>{});
    case Norm::kInf:
      return body(std::integral_constant<Norm, Norm::kInf>{});
  }
}

// X is a number or a vector of numbers. The maximum of NaN and a number is NaN, as in torch.
template <class X>
FLATOUT_HD X magnitude(X x) {
  return x < 0 ? -x : x;
}
template <class X>
FLATOUT_HD X larger(X a, X b) {
  return ((b > a) | (b != b)) ? b : a;
}

// A lane's running result. `bad` is 0 until a gradient is inf or NaN, and NaN from then on, because inf - inf
// and NaN - NaN are NaN. `bad` is separate from the norm, which may overflow even if all gradients are
// finite.
template <Norm kNorm, class Acc>
struct Lane {
  Acc norm;  // a sum of magnitudes, a sum of squares or a maximum
  Acc bad;

  FLATOUT_HD void add(Acc gradient, Acc unscaled) {
    if constexpr (kNorm == Norm::kOne) norm += magnitude(unscaled);
    if constexpr (kNorm == Norm::kTwo) norm += unscaled * unscaled;
    if constexpr (kNorm == Norm::kInf) norm = larger(norm, magnitude(unscaled));
    bad += gradient - gradient;
  }
};

// A chunk's result, in double for all dtypes, so that the sum over many chunks does not overflow. The
// alignment lets one instruction load a partial.
struct alignas(16) Partial {
  double norm;
  double bad;

  template <Norm kNorm>
  FLATOUT_HD void add(const Partial& other) {
    norm = kNorm == Norm::kInf ? larger(norm, other.norm) : norm + other.norm;
    bad += other.bad;
  }
};

struct Verdict {
  float found_inf;     // 1 if a gradient is inf or NaN, else 0
  double grad_norm;    // of the unscaled gradients
  double grad_factor;  // inv_scale x clip coefficient
};

// Returns the verdict on the sum of all partials. The clip coefficient equals that of
// torch.nn.utils.clip_grad_norm_, also for a norm of NaN. max_norm < 0 means no clipping.
template <Norm kNorm>
FLATOUT_HD Verdict conclude(const Partial& total, double inv_scale, double max_norm) {
  Verdict verdict;
  verdict.found_inf = total.bad == 0 ? 0.0f : 1.0f;
  verdict.grad_norm = kNorm == Norm::kTwo ? sqrt(total.norm) : total.norm;
  double coefficient = 1;
  if (max_norm >= 0) {
    coefficient = max_norm / (verdict.grad_norm + 1e-6);
    if (coefficient > 1) coefficient = 1;
  }
  verdict.grad_factor = inv_scale * coefficient;
  return verdict;
}

// Addresses of a verdict on the gradients' device.
struct VerdictAddress {
  float* found_inf;
  void* grad_norm;    // double if `wide`, else float
  void* grad_factor;  // as grad_norm
  bool wide;

  FLATOUT_HD void write(const Verdict& verdict) const {
    *found_inf = verdict.found_inf;
    if (wide) {
      *static_cast<double*>(grad_norm) = verdict.grad_norm;
      *static_cast<double*>(grad_factor) = verdict.grad_factor;
    } else {
      *static_cast<float*>(grad_norm) = static_cast<float>(verdict.grad_norm);
      *static_cast<float*>(grad_factor) = static_cast<float>(verdict.grad_factor);
    }
  }
};

}  // namespace flatout
