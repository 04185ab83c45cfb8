// storage.h: the types in which the streams of a step are stored. All arithmetic is in one compute type.
// Memory may hold 16-bit parameters beside float32 moments, or masters beside rounded parameters.
#pragma once

#include "core/chunks.h"
#include "optim/dynamic8.h"
#include "optim/philox.h"
#include "optim/rules.h"

namespace flatout {

// The 16-bit companion of a weight: a rounded copy that a step writes, or the bits that a bfloat16 lacks.
enum class Low : uint8_t { kNone, kCopy, kRemainder };

// Streams are numbered: 0 weight, 1 gradient, 2.. states, then average, 16-bit companion, and the absmaxes of
// states in 8 bits.
struct Storage {
  uint32_t wide;  // bit s: stream s holds the compute type, else the narrowest type of the step
  bool average;
  Low low;
  bool codes;  // states are codes of optim/dynamic8.h; the first has a sign, others are second moments

  bool operator==(const Storage&) const = default;
  FLATOUT_HD bool is_wide(int stream) const { return (wide >> stream & 1u) != 0; }
  FLATOUT_HD bool is_code(int stream, int states) const {
    return codes && stream >= 2 && stream < 2 + states;
  }
  // Returns the address of element `i` of a stream, or of the absmax of its block. Returns null for a null
  // stream.
  template <class T>
  FLATOUT_HD char* move(void* address, int stream, int states, int64_t i) const {
    int64_t bytes = i * static_cast<int64_t>(is_wide(stream) ? sizeof(compute_t<T>) : sizeof(T));
    if (is_code(stream, states)) bytes = i;
    if (stream >= 4 + states) bytes = i / kDynamicBlock * static_cast<int64_t>(sizeof(float));
    char* moved = address == nullptr ? nullptr : static_cast<char*>(address) + bytes;
#ifdef __CUDA_ARCH__
    // Tells the compiler that the pointer, which is read from shared memory, points to global memory.
    // Otherwise the compiler would use slower generic loads. An early return of null would lose this
    // information.
    __builtin_assume(__isGlobal(moved));
#endif
    return moved;
  }
};

// Work of a step in addition to the rule: averages, unscaling and stochastic rounding.
template <class Acc>
struct Extras {
  Storage storage;
  Acc ema_new;      // 1 - ema_decay
  Acc unscale;      // factor for gradients in memory; 1: gradients are not written
  bool stochastic;  // round 16-bit results stochastically
  RandomKey key;    // random() sets the stream

  FLATOUT_HD Acc average(Acc old, Acc weight) const { return interpolate(old, weight, ema_new); }
  FLATOUT_HD Philox random(int stream, uint32_t group) const {
    RandomKey mine = key;
    mine.stream = static_cast<uint32_t>(stream);
    return philox(mine, group);
  }
};

// Returns the number of steps including this one. A tensor without a count gets 2, so that no step counts as
// its first one.
FLATOUT_HD double next_step(const FlatTensor& tensor) {
  if (tensor.step == nullptr) return 2.0;
  return 1 + (tensor.step_is_double ? *static_cast<const double*>(tensor.step)
                                    : static_cast<double>(*static_cast<const float*>(tensor.step)));
}

FLATOUT_HD void count_step(const FlatTensor& tensor) {
  if (tensor.step == nullptr) return;
  if (tensor.step_is_double) {
    *static_cast<double*>(tensor.step) += 1;
  } else {
    *static_cast<float*>(tensor.step) += 1;
  }
}

template <class Acc>
FLATOUT_HD Extras<Acc> extras_of(const StepConfig& config, const Storage& storage, uint32_t tensor,
                                 double step) {
  return {storage,
          static_cast<Acc>(1 - config.ema_decay),
          static_cast<Acc>(config.unscale_grads ? config.grad_factor.get() : 1),
          config.stochastic,
          {config.seed, 0, tensor, static_cast<uint32_t>(step)}};
}

}  // namespace flatout
