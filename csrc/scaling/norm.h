// norm.h: the arithmetic of unscale + check + norm, written once for the CPU loops and the CUDA kernels.
#pragma once

#include <cmath>

#include "core/scalar.h"

namespace flatout {

// A lane's running result. `bad` stays 0 while every gradient is finite and is NaN afterwards (inf - inf, NaN
// - NaN): kept apart from the sum, which may overflow although no gradient did.
template <class Acc>
struct Lane {
  Acc sum;
  Acc bad;

  FLATOUT_HD void add(Acc gradient, Acc unscaled) {
    sum += unscaled * unscaled;
    bad += gradient - gradient;
  }
};

// A chunk's result, always in double: 3,000 gradients of 1,000 in half precision must not overflow.
struct Partial {
  double sum;
  double bad;

  FLATOUT_HD void add(const Partial& other) {
    sum += other.sum;
    bad += other.bad;
  }
};

struct Verdict {
  float found_inf;     // 1 when a gradient is inf or NaN, else 0
  double grad_norm;    // of the unscaled gradients
  double grad_factor;  // inv_scale x clip coefficient
};

// The coefficient is torch.nn.utils.clip_grad_norm_'s, a NaN norm included; max_norm < 0 means no clipping.
FLATOUT_HD Verdict conclude(const Partial& total, double inv_scale, double max_norm) {
  Verdict verdict;
  verdict.found_inf = total.bad == 0 ? 0.0f : 1.0f;
  verdict.grad_norm = sqrt(total.sum);
  double coefficient = 1;
  if (max_norm >= 0) {
    coefficient = max_norm / (verdict.grad_norm + 1e-6);
    if (coefficient > 1) coefficient = 1;
  }
  verdict.grad_factor = inv_scale * coefficient;
  return verdict;
}

}  // namespace flatout
