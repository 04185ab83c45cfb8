// step_block.h: what one block does in an optimizer step, callable on the host, where a test plays it.
#pragma once

#include "optim/step_chunk.h"

namespace flatout {

template <class Rule, Kind K>
using StepTable = TensorTable<kStreamsOf<Rule, K>, /*Steps=*/true, /*Ids=*/K == Kind::kRandom>;

// Calls body with the kind of kernel that a step needs, as a type.
template <class T, class Body>
void with_kind(const Storage& storage, bool stochastic, const Body& body) {
  if constexpr (std::is_same_v<T, bf16>)
    if (stochastic) return body(std::integral_constant<Kind, Kind::kRandom>{});
  if (storage.average || storage.low != Low::kNone)
    return body(std::integral_constant<Kind, Kind::kExtended>{});
  body(std::integral_constant<Kind, Kind::kPlain>{});
}

// What all threads of a block share.
template <class T, class Rule>
struct BlockStart {
  Place place;
  Rule rule;
  Extras<compute_t<T>> extras;
};

template <class T, class Rule, Kind K, class Table, class Config>
FLATOUT_HD BlockStart<T, Rule> block_start(const Table& table, uint32_t chunk, const Config& config,
                                           const Storage& storage) {
  const Place place = locate(table, chunk);
  const double step = next_step(table.step[place.tensor]);
  uint32_t id = 0;
  if constexpr (K == Kind::kRandom) id = table.id[place.tensor];
  return {place, config.template at<Rule>(step), extras_of<compute_t<T>>(config, storage, id, step)};
}

template <class T, class Rule, Kind K, class Table>
FLATOUT_HD void step_thread(const Table& table, const BlockStart<T, Rule>& start, uint32_t thread,
                            uint32_t threads) {
  using Thread = StepThread<T, Rule, K>;
  const Rule rule = start.rule;  // in registers
  const Extras<compute_t<T>> extras = start.extras;
  Thread self{rule, extras, {}, start.place.begin, start.place.count};
  for (int s = 0; s < Thread::kStreams; ++s)
    self.stream[s] =
        extras.storage.template move<T>(table.address[s][start.place.tensor], s, start.place.begin);
  self.run(thread, threads);
}

template <class Table>
FLATOUT_HD void count_steps(const Table& table, uint32_t thread, uint32_t threads) {
  for (uint32_t t = thread; t < table.tensors; t += threads)
    if (table.step[t] != nullptr) *table.step[t] += 1;
}

}  // namespace flatout
