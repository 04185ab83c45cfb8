// rules.h: the arithmetic of one optimizer step, written once for the CPU loops and the CUDA kernels.
//
// A *config* holds what a whole launch shares; `at(step)` derives from it the *rule* for tensors at one step
// count: a handful of numbers in the compute type. A rule updates one element, given as its streams x = {p,
// g, state...}.
#pragma once

#include <cmath>

#include "core/scalar.h"

namespace flatout {

// Adam and AdamW as torch.optim defines them; the coefficients of the variant that is off are neutral.
template <class Acc, bool Amsgrad>
struct AdamRule {
  using acc = Acc;
  static constexpr int kStreams = Amsgrad ? 5 : 4;  // p, g, exp_avg, exp_avg_sq, max_exp_avg_sq
  Acc factor;                                       // gradient scale x clip coefficient, negated to maximize
  Acc keep;                                         // 1 - lr * weight_decay (decoupled), else 1
  Acc l2;                                           // weight_decay (coupled), else 0
  Acc beta1, beta2, new1, new2;                     // new = 1 - beta
  Acc step_size;                                    // lr / (1 - beta1^step)
  Acc inv_bias2;                                    // 1 / sqrt(1 - beta2^step)
  Acc eps;

  FLATOUT_HD void operator()(Acc (&x)[kStreams]) const {
    const Acc g = x[1] * factor + l2 * x[0];
    const Acc m = beta1 * x[2] + new1 * g;
    const Acc v = beta2 * x[3] + new2 * g * g;
    Acc largest = v;
    if constexpr (Amsgrad) {
      largest = (v > x[4] || v != v) ? v : x[4];  // NaN spreads, as in torch.maximum
      x[4] = largest;
    }
    x[0] = x[0] * keep - step_size * m / (root(largest) * inv_bias2 + eps);
    x[2] = m;
    x[3] = v;
  }

 private:
  FLATOUT_HD static float root(float value) { return sqrtf(value); }
  FLATOUT_HD static double root(double value) { return sqrt(value); }
};

struct AdamConfig {
  DeviceScalar lr, grad_factor;
  const float* found_inf = nullptr;  // a step with *found_inf != 0 changes nothing
  double beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  bool decoupled = false, maximize = false;

  template <class Rule>
  FLATOUT_HD Rule at(double step) const {
    using Acc = typename Rule::acc;
    const double rate = lr.get();
    const double factor = grad_factor.get();
    Rule rule;
    rule.factor = static_cast<Acc>(maximize ? -factor : factor);
    rule.keep = static_cast<Acc>(decoupled ? 1 - rate * weight_decay : 1);
    rule.l2 = static_cast<Acc>(decoupled ? 0 : weight_decay);
    rule.beta1 = static_cast<Acc>(beta1);
    rule.beta2 = static_cast<Acc>(beta2);
    rule.new1 = static_cast<Acc>(1 - beta1);
    rule.new2 = static_cast<Acc>(1 - beta2);
    rule.step_size = static_cast<Acc>(rate / (1 - pow(beta1, step)));
    rule.inv_bias2 = static_cast<Acc>(1 / sqrt(1 - pow(beta2, step)));
    rule.eps = static_cast<Acc>(eps);
    return rule;
  }
};

// torch.optim.SGD. Its buffer is the bare gradient in the first step *taken*, whatever the dampening: a step
// count per tensor says which one that is, because the host cannot know whether the device skipped.
template <class Acc, bool Momentum, bool Nesterov>
struct SgdRule {
  using acc = Acc;
  static constexpr int kStreams = Momentum ? 3 : 2;  // p, g, momentum_buffer
  Acc factor, l2, lr;
  Acc keep;   // of the buffer: momentum, 0 in the first step
  Acc add;    // of the gradient: 1 - dampening, 1 in the first step
  Acc ahead;  // momentum, for Nesterov's look ahead

  FLATOUT_HD void operator()(Acc (&x)[kStreams]) const {
    Acc direction = x[1] * factor + l2 * x[0];
    if constexpr (Momentum) {
      x[2] = keep * x[2] + add * direction;
      direction = Nesterov ? direction + ahead * x[2] : x[2];
    }
    x[0] -= lr * direction;
  }
};

struct SgdConfig {
  DeviceScalar lr, grad_factor;
  const float* found_inf = nullptr;
  double momentum = 0, dampening = 0, weight_decay = 0;
  bool maximize = false;

  template <class Rule>
  FLATOUT_HD Rule at(double step) const {
    using Acc = typename Rule::acc;
    const double factor = grad_factor.get();
    const bool first = step == 1;
    Rule rule;
    rule.factor = static_cast<Acc>(maximize ? -factor : factor);
    rule.l2 = static_cast<Acc>(weight_decay);
    rule.lr = static_cast<Acc>(lr.get());
    rule.keep = static_cast<Acc>(first ? 0 : momentum);
    rule.add = static_cast<Acc>(first ? 1 : 1 - dampening);
    rule.ahead = static_cast<Acc>(momentum);
    return rule;
  }
};

}  // namespace flatout
