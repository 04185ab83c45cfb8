// loss_scale.h: the reciprocal and the next value of a gradient scaler's loss scale, on the device.
#pragma once

#include "core/scalar.h"

namespace flatout {

struct LossScale {
  const float* scale = nullptr;  // null: no loss scale
  const int32_t* growth_tracker = nullptr;
  float* next_scale = nullptr;
  int32_t* next_growth_tracker = nullptr;
  bool* skipped = nullptr;
  double growth_factor = 1, backoff_factor = 1;
  int64_t growth_interval = 1;

  // torch computes the reciprocal in double and rounds it. The result is the same for each float.
  FLATOUT_HD float inverse() const { return 1.0f / *scale; }

  // The arithmetic of torch._amp_update_scale_.
  FLATOUT_HD void write_next(bool found_inf) const {
    const int64_t successful = found_inf ? 0 : int64_t{*growth_tracker} + 1;
    const bool grows = !found_inf && successful == growth_interval;  // never for an interval of 0
    float next = *scale;
    if (found_inf) next = static_cast<float>(next * backoff_factor);
    if (grows) {
      const auto grown = static_cast<float>(next * growth_factor);
      if (grown - grown == 0) next = grown;  // keeps the scale if the product overflows
    }
    *next_scale = next;
    *next_growth_tracker = grows ? 0 : static_cast<int32_t>(successful);
    *skipped = found_inf;
  }
};

// The factor that unscales gradients: a number, or the reciprocal of a loss scale.
struct Unscaling {
  DeviceScalar factor{nullptr, false, 1};
  LossScale loss_scale;

  FLATOUT_HD double get() const {
    return loss_scale.scale == nullptr ? factor.get() : static_cast<double>(loss_scale.inverse());
  }
};

}  // namespace flatout
