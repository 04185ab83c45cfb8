// reference.h: optimizers in double, by the definitions of torch.optim and of the Lion paper.
#pragma once

#include <cmath>

#include "optim/rules.h"

namespace harness {

struct Optimizer {
  flatout::RuleName rule;
  double lr = 0x1p-7, weight_decay = 0.1;
  double beta1 = 0.9, beta2 = 0.99, eps = 1e-8;
  double momentum = 0, dampening = 0;
  bool is_decoupled = false, amsgrad = false, nesterov = false, maximize = false;

  int states() const {
    if (rule == flatout::RuleName::kAdam) return amsgrad ? 3 : 2;
    return rule == flatout::RuleName::kLion || momentum != 0 ? 1 : 0;
  }
  std::vector<double> options() const {
    if (rule == flatout::RuleName::kAdam) return {beta1, beta2, eps, is_decoupled ? 1.0 : 0.0};
    if (rule == flatout::RuleName::kSgd) return {momentum, dampening, nesterov ? 1.0 : 0.0};
    return {beta1, beta2};
  }

  // True if a rounding error may change the direction of Lion's step.
  bool is_ambiguous(const double* x) const {
    const double gradient = maximize ? -x[1] : x[1];
    return rule == flatout::RuleName::kLion && std::abs(beta1 * x[2] + (1 - beta1) * gradient) < 1e-6;
  }

  // Updates x = {weight, gradient, state...} in the step with this count.
  void step(double* x, double count) const {
    double &weight = x[0], *state = x + 2;
    double gradient = maximize ? -x[1] : x[1];
    if (rule == flatout::RuleName::kLion) return step_lion(weight, gradient, state[0]);
    if (is_decoupled) {
      weight -= lr * weight_decay * weight;
    } else {
      gradient += weight_decay * weight;
    }
    rule == flatout::RuleName::kAdam ? step_adam(weight, gradient, state, count)
                                     : step_sgd(weight, gradient, state, count);
  }

 private:
  void step_adam(double& weight, double gradient, double* state, double count) const {
    state[0] = beta1 * state[0] + (1 - beta1) * gradient;
    state[1] = beta2 * state[1] + (1 - beta2) * gradient * gradient;
    double second = state[1];
    if (amsgrad) second = state[2] = std::fmax(state[2], second);
    const double corrected = std::sqrt(second / (1 - std::pow(beta2, count)));
    weight -= lr * state[0] / (1 - std::pow(beta1, count)) / (corrected + eps);
  }

  void step_sgd(double& weight, double gradient, double* state, double count) const {
    if (momentum != 0) {
      state[0] = count == 1 ? gradient : momentum * state[0] + (1 - dampening) * gradient;
      gradient = nesterov ? gradient + momentum * state[0] : state[0];
    }
    weight -= lr * gradient;
  }

  void step_lion(double& weight, double gradient, double& average) const {
    const double direction = beta1 * average + (1 - beta1) * gradient;
    weight -= lr * weight_decay * weight;
    weight -= lr * (direction > 0 ? 1 : direction < 0 ? -1 : 0);
    average = beta2 * average + (1 - beta2) * gradient;
  }
};

}  // namespace harness
