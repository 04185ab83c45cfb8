// norms.h: the state that all launches of one call of grad_norms share, and the result of the call.
#pragma once

#include "scaling/conclusion.h"

namespace flatout {

struct Norms {
  Partial* partials;  // one per chunk of a launch
  Counter counter;
  DeviceScalar inv_scale;
  void* norms;  // of all gradients; double if `wide`, else float
  bool wide;
  bool writes_empty;  // writes 0 for gradients without elements

  // Returns a copy without the gradients before `first`.
  FLATOUT_HD Norms from(uint32_t first) const {
    Norms rest = *this;
    rest.norms = static_cast<char*>(norms) + uint64_t{first} * (wide ? sizeof(double) : sizeof(float));
    return rest;
  }

  // Writes the norm of a gradient from the sum of its chunks.
  template <Norm kNorm>
  FLATOUT_HD void write(uint32_t tensor, uint32_t chunks, const Partial& total) const {
    if (chunks == 0 && !writes_empty) return;
    const double norm = conclude<kNorm>(total, 1, -1).grad_norm;
    if (wide) {
      static_cast<double*>(norms)[tensor] = norm;
    } else {
      static_cast<float*>(norms)[tensor] = static_cast<float>(norm);
    }
  }
};

}  // namespace flatout
