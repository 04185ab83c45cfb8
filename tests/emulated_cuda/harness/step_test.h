// step_test.h: compares an optimizer step on a device with the step on the host and with its definition.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cases.h"
#include "memory.h"
#include "optim/storage.h"
#include "reference.h"

namespace harness {

// Place of a number: a float or a double on the device, or a number that the host knows.
enum class Where { kHost, kFloat, kDouble };

struct StepTest {
  Optimizer optimizer;
  std::vector<int64_t> sizes;
  flatout::Storage storage{};
  bool stochastic = false;
  double ema_decay = 0.75;
  // Elements by which streams begin after a multiple of 64 bytes.
  std::size_t misalignment = 0, grad_misalignment = 0;
  bool counts_steps = true, count_is_double = false;
  Where lr = Where::kHost, last_lr = Where::kHost, factor = Where::kHost;
  double grad_factor = 1;
  bool unscales_grads = false;
  std::optional<float> found_inf{};
  // Limit of the norm in the check that gives found_inf and grad_factor; < 0: no check.
  double max_norm = -1;
  bool has_infinity = false;  // in the last gradient
  int device = 0, steps = 2;

  // Param group of a tensor: the first or the last one of a bucket.
  static std::size_t group_of(std::size_t tensor) { return tensor % 2 * (flatout::kMaxGroups - 1); }
  // Returns the optimizer with the numbers of a tensor's group.
  Optimizer optimizer_of(std::size_t tensor) const {
    Optimizer found = optimizer;
    if (group_of(tensor) != 0) found.lr *= 4, found.weight_decay /= 4;
    return found;
  }
};

template <class T>
void run_step_test(const StepTest& test, Report& report);

}  // namespace harness
