// step_block.h: the work of one block in an optimizer step. Host code can call the functions, for tests.
#pragma once

#include "optim/step_chunk.h"
#include "optim/step_codes.h"
#include "optim/step_table.h"
#include "scaling/check_chunk.h"

namespace flatout {

// Calls body with the kind of kernel that a step needs, as a type.
template <class T, class Rule, class Body>
void with_kind(const Storage& storage, bool stochastic, const Body& body) {
  if constexpr (std::is_same_v<compute_t<T>, float> && Rule::kStates != 0) {
    if constexpr (std::is_same_v<T, bf16>)
      if (storage.codes && stochastic) return body(std::integral_constant<Kind, Kind::kRandomCodes>{});
    if (storage.codes) return body(std::integral_constant<Kind, Kind::kCodes>{});
  }
  if constexpr (std::is_same_v<T, bf16>)
    if (stochastic) return body(std::integral_constant<Kind, Kind::kRandom>{});
  if (storage == fixed_storage<T, Rule, Kind::kPlain>())
    return body(std::integral_constant<Kind, Kind::kPlain>{});
  if constexpr (std::is_same_v<T, bf16>) {
    if constexpr (Rule::kStates != 0)
      if (storage == fixed_storage<T, Rule, Kind::kWideStates>())
        return body(std::integral_constant<Kind, Kind::kWideStates>{});
    if (storage == fixed_storage<T, Rule, Kind::kRemainder>())
      return body(std::integral_constant<Kind, Kind::kRemainder>{});
  }
  body(std::integral_constant<Kind, Kind::kExtended>{});
}

// Values that all threads of a block share.
template <class T, class Rule>
struct BlockStart {
  Place place;
  double step, power[kPowers];
  Rule rule;
  Extras<compute_t<T>> extras;
};

// Begins to fill `start`. kPowers lanes call it: lane 0 finds the place, and each lane computes one power.
// The result goes to memory, because a returned value would stay in registers and lower the occupancy.
template <class T, class Rule, class Batch, class Config>
FLATOUT_HD void find_start(BlockStart<T, Rule>& start, const StepTable& table, const Batch& batch, uint32_t t,
                           uint32_t chunk, const Config& config, uint32_t lane) {
  const double step = next_step(table.tensor[batch.first_tensor + t]);
  if (lane == 0) {
    find_place(start.place, table, batch, t, chunk);
    start.step = step;
  }
  start.power[lane] = config.power(lane, step);
}

// Fills the rest of `start`. One lane calls it after all lanes of find_start.
template <class T, class Rule, class Config>
FLATOUT_HD void finish_start(BlockStart<T, Rule>& start, const Config& config, const Storage& storage) {
  start.rule = config.template at<Rule>(config.group[start.place.tensor.group], start.step, start.power);
  start.extras = extras_of<compute_t<T>>(config, storage, start.place.tensor.id, start.step);
}

template <class T, class Rule, Kind K>
FLATOUT_HD void step_thread(const BlockStart<T, Rule>& start, uint32_t thread, uint32_t threads) {
  using Thread = StepThread<T, Rule, K>;
  const Rule rule = start.rule;  // in registers
  const Extras<compute_t<T>> extras = start.extras;
  const Place& place = start.place;
  Thread self{rule, extras, {}, place.begin, place.count};
  for (int s = 0; s < Thread::kStreams; ++s)
    self.stream[s] = self.storage().template move<T>(place.tensor.address[s], s, Rule::kStates, place.begin);
  self.run(thread, threads);
}

// Multiplies gradients in memory by the factor. Runs right after the step over the same chunk, so that it
// reads from L2. Inside the step, this work would take registers. Kernels would lose up to half of their
// occupancy, even kernels that do not write gradients.
template <class T, class Rule, Kind K>
FLATOUT_HD void unscale_thread(const BlockStart<T, Rule>& start, uint32_t thread, uint32_t threads) {
  const compute_t<T> factor = start.extras.unscale;
  const Storage storage = storage_of<T, Rule, K>(start.extras.storage);
  const Place& place = start.place;
  char* first = storage.template move<T>(place.tensor.address[1], 1, Rule::kStates, place.begin);
  const auto unscale = [&](auto* gradients) {
    using Element = std::remove_pointer_t<decltype(gradients)>;
    scale_chunk<Element>(ChunkView<Element>{gradients, place.count}, factor, thread, threads);
  };
  if (storage.is_wide(1)) {
    unscale(reinterpret_cast<compute_t<T>*>(first));
  } else {
    unscale(reinterpret_cast<T*>(first));
  }
}

template <class Batch>
FLATOUT_HD void count_steps(const StepTable& table, const Batch& batch, uint32_t thread, uint32_t threads) {
  for (uint32_t t = thread; t < batch.tensors; t += threads) count_step(table.tensor[batch.first_tensor + t]);
}

}  // namespace flatout
