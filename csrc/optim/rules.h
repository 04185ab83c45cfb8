// rules.h: the arithmetic of one optimizer step, written once for the CPU loops and the CUDA kernels. The
// arithmetic rounds and fuses where torch.optim's operations do.
//
// A *config* holds the settings of a whole step. Its function `at(group, step, powers)` returns the *rule*
// for tensors of one param group at one step count: a few numbers in the compute type. A rule updates one
// element, given as x = {weight, gradient, states...}. To add an optimizer, add its rule and config here, and
// extend RuleName, rule_named and with_config.
#pragma once

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/scalar.h"

namespace flatout {

inline constexpr int kMaxStates = 3;
inline constexpr uint32_t kPowers = 2;     // powers of the step count that a rule may need
inline constexpr int64_t kMaxGroups = 64;  // of a bucket; MAX_GROUPS in bucket_plan.py

// Numbers of one param group. All other settings are common to the groups of a bucket.
struct GroupNumbers {
  DeviceScalar lr;
  double weight_decay = 0;
};

// Settings that the steps of all optimizers have.
struct StepConfig {
  GroupNumbers group[kMaxGroups];
  DeviceScalar grad_factor;
  const float* found_inf = nullptr;  // a step with *found_inf != 0 changes nothing
  bool maximize = false;
  bool unscale_grads = false;  // multiplies gradients in memory by grad_factor, even in a skipped step
  double ema_decay = 0;
  bool stochastic = false;  // 16-bit results are rounded stochastically, with bits from `seed`
  uint64_t seed = 0;

  // Returns one of the powers that `at` needs. They are slow on most GPUs, so each is computed by another
  // thread.
  FLATOUT_HD static double power(uint32_t /*which*/, double /*step*/) { return 1; }
  // Returns the factor of all gradients.
  FLATOUT_HD double factor() const { return maximize ? -grad_factor.get() : grad_factor.get(); }
};

// Returns a gradient with coupled weight decay. Without decay, the weight is not used, because 0 x inf would
// be NaN.
template <class Acc>
FLATOUT_HD Acc with_decay(Acc gradient, Acc l2, Acc weight) {
  return l2 == 0 ? gradient : fused_multiply_add(l2, weight, gradient);
}

// Adam and AdamW, as torch.optim defines them. AdamW has l2 = 0, and Adam has keep = 1.
template <class Acc, bool Amsgrad>
struct AdamRule {
  using acc = Acc;
  static constexpr int kStates = Amsgrad ? 3 : 2;  // exp_avg, exp_avg_sq, max_exp_avg_sq
  Acc factor;                                      // gradient scale x clip coefficient, negated to maximize
  Acc keep;                                        // 1 - lr * weight_decay (decoupled), else 1
  Acc l2;                                          // weight_decay (coupled), else 0
  Acc beta2, new1, new2;                           // new = 1 - beta
  Acc step_size;                                   // lr / (1 - beta1^step)
  Acc inv_bias2;                                   // 1 / sqrt(1 - beta2^step)
  Acc eps;

  FLATOUT_HD void operator()(Acc (&x)[2 + kStates]) const {
    const Acc g = with_decay(x[1] * factor, l2, x[0]);
    const Acc m = interpolate(x[2], g, new1);
    const Acc v = fused_multiply_add(new2 * g, g, beta2 * x[3]);
    Acc largest = v;
    if constexpr (Amsgrad) {
      largest = (v > x[4] || v != v) ? v : x[4];  // NaN propagates, as in torch.maximum
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

struct AdamConfig : StepConfig {
  static constexpr std::size_t kOptions = 4;
  double beta1, beta2, eps;
  bool decoupled;

  AdamConfig(const StepConfig& common, const double* options)
      : StepConfig(common),
        beta1(options[0]),
        beta2(options[1]),
        eps(options[2]),
        decoupled(options[3] != 0) {}

  // Calls body with a null pointer of the rule's type. Returns false if tensors cannot have that many states.
  template <class Acc, class Body>
  bool with_rule(int states, const Body& body) const {
    if (states == 2) return body(static_cast<AdamRule<Acc, false>*>(nullptr)), true;
    if (states == 3) return body(static_cast<AdamRule<Acc, true>*>(nullptr)), true;
    return false;
  }

  FLATOUT_HD double power(uint32_t which, double step) const { return pow(which == 0 ? beta1 : beta2, step); }
  template <class Rule>
  FLATOUT_HD Rule at(const GroupNumbers& group, double /*step*/, const double (&power)[kPowers]) const {
    using Acc = typename Rule::acc;
    const double rate = group.lr.get();
    Rule rule;
    rule.factor = static_cast<Acc>(factor());
    rule.keep = static_cast<Acc>(decoupled ? 1 - rate * group.weight_decay : 1);
    rule.l2 = static_cast<Acc>(decoupled ? 0 : group.weight_decay);
    rule.beta2 = static_cast<Acc>(beta2);
    rule.new1 = static_cast<Acc>(1 - beta1);
    rule.new2 = static_cast<Acc>(1 - beta2);
    rule.step_size = static_cast<Acc>(rate / (1 - power[0]));
    rule.inv_bias2 = static_cast<Acc>(1 / sqrt(1 - power[1]));
    rule.eps = static_cast<Acc>(eps);
    return rule;
  }
};

// torch.optim.SGD. The first step that is not skipped sets the momentum buffer to the gradient, without
// dampening. Only the device knows which steps it has
// skipped. So each tensor has a step count on the device.
template <class Acc, bool Momentum, bool Nesterov>
struct SgdRule {
  using acc = Acc;
  static constexpr int kStates = Momentum ? 1 : 0;  // momentum_buffer
  Acc factor, l2, lr;
  Acc keep;   // factor of the buffer: momentum, or 0 in the first step
  Acc add;    // factor of the gradient: 1 - dampening, or 1 in the first step
  Acc ahead;  // momentum, for Nesterov's look ahead

  FLATOUT_HD void operator()(Acc (&x)[2 + kStates]) const {
    Acc direction = with_decay(x[1] * factor, l2, x[0]);
    if constexpr (Momentum) {
      x[2] = fused_multiply_add(add, direction, keep * x[2]);
      direction = Nesterov ? fused_multiply_add(ahead, x[2], direction) : x[2];
    }
    x[0] = fused_multiply_add(-lr, direction, x[0]);
  }
};

struct SgdConfig : StepConfig {
  static constexpr std::size_t kOptions = 3;
  double momentum, dampening;
  bool nesterov;

  SgdConfig(const StepConfig& common, const double* options)
      : StepConfig(common), momentum(options[0]), dampening(options[1]), nesterov(options[2] != 0) {}

  template <class Acc, class Body>
  bool with_rule(int states, const Body& body) const {
    if (states == 0 && momentum == 0) return body(static_cast<SgdRule<Acc, false, false>*>(nullptr)), true;
    if (states != 1) return false;
    nesterov ? body(static_cast<SgdRule<Acc, true, true>*>(nullptr))
             : body(static_cast<SgdRule<Acc, true, false>*>(nullptr));
    return true;
  }

  // Without step counts, `step` is never 1. Then the buffers must start as zeros, and dampening must be 0, so
  // that the first step needs no other factors.
  template <class Rule>
  FLATOUT_HD Rule at(const GroupNumbers& group, double step, const double (&)[kPowers]) const {
    using Acc = typename Rule::acc;
    const bool first = step == 1;
    Rule rule;
    rule.factor = static_cast<Acc>(factor());
    rule.l2 = static_cast<Acc>(group.weight_decay);
    rule.lr = static_cast<Acc>(group.lr.get());
    rule.keep = static_cast<Acc>(first ? 0 : momentum);
    rule.add = static_cast<Acc>(first ? 1 : 1 - dampening);
    rule.ahead = static_cast<Acc>(momentum);
    return rule;
  }
};

// Chen et al., "Symbolic discovery of optimization algorithms" (2023), program 1, with decoupled weight
// decay.
template <class Acc>
struct LionRule {
  using acc = Acc;
  static constexpr int kStates = 1;  // exp_avg
  Acc factor, keep, lr;
  Acc beta1, beta2, new1, new2;

  FLATOUT_HD void operator()(Acc (&x)[2 + kStates]) const {
    const Acc g = x[1] * factor;
    const Acc c = fused_multiply_add(new1, g, beta1 * x[2]);
    const Acc sign = c > 0 ? Acc(1) : c < 0 ? Acc(-1) : c;  // 0 and NaN stay as they are
    x[0] = x[0] * keep - lr * sign;
    x[2] = fused_multiply_add(new2, g, beta2 * x[2]);
  }
};

struct LionConfig : StepConfig {
  static constexpr std::size_t kOptions = 2;
  double beta1, beta2;

  LionConfig(const StepConfig& common, const double* options)
      : StepConfig(common), beta1(options[0]), beta2(options[1]) {}

  template <class Acc, class Body>
  bool with_rule(int states, const Body& body) const {
    if (states != 1) return false;
    return body(static_cast<LionRule<Acc>*>(nullptr)), true;
  }

  template <class Rule>
  FLATOUT_HD Rule at(const GroupNumbers& group, double /*step*/, const double (&)[kPowers]) const {
    using Acc = typename Rule::acc;
    const double rate = group.lr.get();
    Rule rule;
    rule.factor = static_cast<Acc>(factor());
    rule.keep = static_cast<Acc>(1 - rate * group.weight_decay);
    rule.lr = static_cast<Acc>(rate);
    rule.beta1 = static_cast<Acc>(beta1);
    rule.beta2 = static_cast<Acc>(beta2);
    rule.new1 = static_cast<Acc>(1 - beta1);
    rule.new2 = static_cast<Acc>(1 - beta2);
    return rule;
  }
};

enum class RuleName { kAdam, kSgd, kLion };

inline RuleName rule_named(const std::string& name) {
  if (name == "adam") return RuleName::kAdam;
  if (name == "sgd") return RuleName::kSgd;
  if (name == "lion") return RuleName::kLion;
  throw std::invalid_argument("rule must be adam, sgd or lion, got " + name);
}

// Calls body with the config of a rule, made from the common settings and the rule's options.
template <class Body>
void with_config(RuleName rule, const StepConfig& common, const std::vector<double>& options,
                 const Body& body) {
  const auto call = [&](auto* config) {
    using Config = std::remove_pointer_t<decltype(config)>;
    if (options.size() != Config::kOptions)
      throw std::invalid_argument("options must hold " + std::to_string(Config::kOptions) + " numbers, got " +
                                  std::to_string(options.size()));
    body(Config(common, options.data()));
  };
  switch (rule) {
    case RuleName::kAdam:
      return call(static_cast<AdamConfig*>(nullptr));
    case RuleName::kSgd:
      return call(static_cast<SgdConfig*>(nullptr));
    case RuleName::kLion:
      return call(static_cast<LionConfig*>(nullptr));
  }
}

}  // namespace flatout
