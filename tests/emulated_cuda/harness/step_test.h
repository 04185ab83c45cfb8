// step_test.h: an optimizer step on a device, compared with the host and with the step's definition.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cases.h"
#include "memory.h"
#include "optim/storage.h"
#include "reference.h"

namespace harness {

// A float or a double on the device, or a number that the host knows.
enum class Where { kHost, kFloat, kDouble };

struct StepTest {
  Optimizer optimizer;
  std::vector<int64_t> sizes;
  flatout::Storage storage{};
  bool stochastic = false;
  double ema_decay = 0.75;
  // Elements that streams begin beside a multiple of 64 bytes.
  std::size_t misalignment = 0, grad_misalignment = 0;
  bool counts_steps = true, count_is_double = false;
  Where lr = Where::kHost, factor = Where::kHost;
  double grad_factor = 1;
  bool unscales_grads = false;
  std::optional<float> found_inf{};
  // The check of the gradients that gives found_inf and grad_factor; < 0: no check.
  double max_norm = -1;
  bool has_infinity = false;  // in the last gradient
  int device = 0, steps = 2;
};

template <class T>
void run_step_test(const StepTest& test, Report& report);

}  // namespace harness
