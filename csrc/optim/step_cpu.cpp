// step_cpu.cpp: optimizer steps on the CPU: one pass over memory, all cores, widest vectors.
#include <torch/csrc/stable/library.h>

#include "core/cpu.h"
#include "core/staging.h"
#include "optim/step.h"

namespace flatout {
namespace {

// The inner loop. The rule is a local copy and the streams are restrict, so that the loop vectorizes. A
// separate loop multiplies gradients by `unscale`, because with a second store some rules would not
// vectorize.
template <class Rule, class Acc>
FLATOUT_HD void apply(const Rule rule, Acc* const (&stream)[2 + Rule::kStates], uint32_t count, Acc unscale) {
  constexpr int kStreams = 2 + Rule::kStates;
  Acc* __restrict w = stream[0];
  Acc* __restrict g = stream[1];
  Acc* __restrict a = stream[kStreams > 2 ? 2 : 0];
  Acc* __restrict b = stream[kStreams > 3 ? 3 : 0];
  Acc* __restrict c = stream[kStreams > 4 ? 4 : 0];
  // Prefetches inside the loop would keep the loop from vectorizing, so they are placed between runs.
  // With `unscale`, short runs keep the gradients in L1 for the second loop.
  const uint32_t run = prefetches_pay ? 256 / sizeof(Acc) : unscale != 1 ? kBlock : count;
  for (uint32_t begin = 0; begin < count; begin += run) {
    const uint32_t end = begin + run < count ? begin + run : count;
    for (const Acc* address : stream) prefetch_ahead(address + begin, run * sizeof(Acc), 2048);
#pragma GCC ivdep
    for (uint32_t i = begin; i < end; ++i) {
      Acc x[kStreams];
      x[0] = w[i];
      x[1] = g[i];
      if constexpr (kStreams > 2) x[2] = a[i];
      if constexpr (kStreams > 3) x[3] = b[i];
      if constexpr (kStreams > 4) x[4] = c[i];
      rule(x);
      w[i] = x[0];
      if constexpr (kStreams > 2) a[i] = x[2];
      if constexpr (kStreams > 3) b[i] = x[3];
      if constexpr (kStreams > 4) c[i] = x[4];
    }
    if (unscale == 1) continue;
    for (uint32_t i = begin; i < end; ++i) g[i] *= unscale;
  }
}

// One chunk of one tensor. A stream that is not stored in the compute type is staged a block at a time. Its
// elements are widened into a buffer that stays in L1, updated there, and narrowed.
template <class T, class Rule>
struct StepChunk {
  using Acc = compute_t<T>;
  static constexpr int kCore = 2 + Rule::kStates;
  static constexpr int kAverage = kCore, kLow = kCore + 1, kAbsmax = kCore + 2;

  Rule rule;
  Extras<Acc> extras;
  char* stream[kCore + 2 + Rule::kStates];  // at the chunk's first element; null: no such stream
  int64_t begin;                            // the chunk's first element in its tensor
  uint32_t count;

  template <class Element>
  Element* at(int s, uint32_t i) const {
    return reinterpret_cast<Element*>(stream[s]) + i;
  }

  [[gnu::always_inline]] void operator()() const {
    if constexpr (std::is_same_v<T, Acc>) {
      if (!extras.storage.average && !extras.storage.codes) {
        Acc* direct[kCore];
        for (int s = 0; s < kCore; ++s) direct[s] = at<Acc>(s, 0);
        return apply(rule, direct, count, extras.unscale);
      }
    }
    for (uint32_t i = 0; i < count; i += kBlock) block(i, i + kBlock < count ? kBlock : count - i);
  }

  FLATOUT_HD void block(uint32_t i, uint32_t n) const {
    alignas(64) Acc buffer[kCore][kBlock];
    Acc* staged[kCore];
    for (int s = 0; s < kCore; ++s) {
      staged[s] = is_wide(s) ? at<Acc>(s, i) : buffer[s];
      if (!is_wide(s)) fetch(s, i, staged[s], n);
    }
    apply(rule, staged, n, extras.unscale);
    for (int s = 0; s < kCore; ++s)
      if ((s != 1 || extras.unscale != 1) && !is_wide(s)) put(s, i, staged[s], n);
    if (extras.storage.average) {
      Acc* __restrict average = at<Acc>(kAverage, i);
      const Acc* __restrict weight = staged[0];
      for (uint32_t k = 0; k < n; ++k) average[k] = extras.average(average[k], weight[k]);
    }
    if constexpr (!std::is_same_v<T, Acc>)
      if (extras.storage.low == Low::kCopy) narrow(staged[0], at<T>(kLow, i), n);
  }

 private:
  FLATOUT_HD bool is_code(int s) const {
    return std::is_same_v<Acc, float> && extras.storage.is_code(s, Rule::kStates);
  }
  FLATOUT_HD bool is_wide(int s) const {
    return !is_code(s) && (std::is_same_v<T, Acc> || extras.storage.is_wide(s));
  }
  FLATOUT_HD bool has_remainder(int s) const { return s == 0 && extras.storage.low == Low::kRemainder; }

  FLATOUT_HD void fetch(int s, uint32_t i, Acc* __restrict to, uint32_t n) const {
    if constexpr (std::is_same_v<Acc, float>)
      if (is_code(s)) return s == 2 ? decode<true>(s, i, to, n) : decode<false>(s, i, to, n);
    if constexpr (std::is_same_v<T, bf16>) {
      if (has_remainder(s)) {
        const T* __restrict high = at<T>(s, i);
        const int16_t* __restrict rest = at<int16_t>(kLow, i);
        for (uint32_t k = 0; k < n; ++k) to[k] = join(high[k], rest[k]);
        return;
      }
    }
    if constexpr (!std::is_same_v<T, Acc>) {
      prefetch_ahead(at<T>(s, i), n * sizeof(T), 4096);
      widen(at<T>(s, i), to, n);
    }
  }

  FLATOUT_HD void put(int s, uint32_t i, const Acc* __restrict from, uint32_t n) const {
    if constexpr (std::is_same_v<Acc, float>)
      if (is_code(s)) return s == 2 ? encode<true>(s, i, from, n) : encode<false>(s, i, from, n);
    if constexpr (std::is_same_v<T, bf16>) {
      T* __restrict to = at<T>(s, i);
      if (has_remainder(s)) {
        int16_t* __restrict rest = at<int16_t>(kLow, i);
        for (uint32_t k = 0; k < n; ++k) split(from[k], to[k], rest[k]);
        return;
      }
      if (extras.stochastic && s != 1) return put_stochastic(s, i, from, to, n);
    }
    if constexpr (!std::is_same_v<T, Acc>) narrow(from, at<T>(s, i), n);
  }

  template <bool Signed>
  FLATOUT_HD void decode(int s, uint32_t i, float* __restrict to, uint32_t n) const {
    prefetch_ahead(at<uint8_t>(s, i), n, 4096);
    const float* absmax = at<float>(kAbsmax + s - 2, i / kDynamicBlock);
    decode_blocks<Signed>(at<uint8_t>(s, i), absmax, to, n);
  }
  template <bool Signed>
  FLATOUT_HD void encode(int s, uint32_t i, const float* __restrict from, uint32_t n) const {
    static_assert(kChunk % kDynamicBlock == 0 && kBlock % kDynamicBlock == 0, "blocks straddle nothing");
    encode_blocks<Signed>(from, at<uint8_t>(s, i), at<float>(kAbsmax + s - 2, i / kDynamicBlock), n);
  }

  FLATOUT_HD void put_stochastic(int s, uint32_t i, const float* __restrict from, bf16* __restrict to,
                                 uint32_t n) const {
    alignas(64) uint16_t random[kBlock + kGroup];
    static_assert(kChunk % kGroup == 0 && kBlock % kGroup == 0, "blocks begin with a group");
    const auto group = static_cast<uint32_t>((begin + i) / kGroup);
    for (uint32_t g = 0; g * kGroup < n; ++g) {
      const Philox bits = extras.random(s, group + g);
      for (uint32_t j = 0; j < kGroup; ++j) random[g * kGroup + j] = bits.bits(j);
    }
    for (uint32_t k = 0; k < n; ++k) store_stochastic(to[k], from[k], random[k]);
  }
};

// The rule for one step count and param group. Neighboring tensors mostly share both, so the rule and its
// powers are computed once.
template <class Rule>
struct AtStep {
  Rule rule;
  uint32_t step;
  uint8_t group;
};

template <class Rule, class Config>
std::vector<AtStep<Rule>> rules_of(const Config& config, const std::vector<FlatTensor>& tensors) {
  std::vector<AtStep<Rule>> rules;
  rules.reserve(tensors.size());
  double power[kPowers] = {};
  AtStep<Rule> last{};
  for (const FlatTensor& tensor : tensors) {
    const double step = next_step(tensor);
    const auto count = static_cast<uint32_t>(step);
    const bool same = !rules.empty() && last.step == count;
    for (uint32_t which = 0; !same && which < kPowers; ++which) power[which] = config.power(which, step);
    if (!same || last.group != tensor.group)
      last = {config.template at<Rule>(config.group[tensor.group], step, power), count, tensor.group};
    rules.push_back(last);
  }
  return rules;
}

template <class T, class Rule, class Config>
void run_chunks(const Config& config, const Storage& storage, const std::vector<FlatTensor>& tensors) {
  using Acc = compute_t<T>;
  const std::vector<uint32_t> first = first_chunks(tensors);
  const std::vector<AtStep<Rule>> rules = rules_of<Rule>(config, tensors);
  for_each_chunk(
      tensors, first,
      [&](uint32_t t, int64_t begin, uint32_t count, uint32_t) {
        StepChunk<T, Rule> chunk{
            rules[t].rule, extras_of<Acc>(config, storage, tensors[t].id, rules[t].step), {}, begin, count};
        for (int s = 0; s < 4 + 2 * Rule::kStates; ++s)
          chunk.stream[s] = storage.template move<T>(tensors[t].address[s], s, Rule::kStates, begin);
        run_vectorized(chunk);
      },
      // After a check, the caches hold the last gradients. Without a check, the caches hold the first
      // gradients, which the backward has computed last.
      config.grad_factor.address != nullptr ? Direction::kBackwards : Direction::kForwards);
}

class CpuBucket final : public Bucket {
 public:
  using Bucket::Bucket;

  CheckResult check(const Check& check) const override { return check_on_cpu(check, leader()); }

 private:
  void run(RuleName rule, int states, ScalarType dtype, const Storage& storage, const StepConfig& common,
           const std::vector<double>& options, const std::vector<FlatTensor>& tensors) override {
    if (common.found_inf != nullptr && *common.found_inf != 0) {
      if (common.unscale_grads) scale_on_cpu(tensors, 1, grad_dtype(), common.grad_factor.get());
      return;
    }
    with_config(rule, common, options, [&](const auto& config) {
      with_dtype(dtype, [&]<class T>(T*) {
        const bool known = config.template with_rule<compute_t<T>>(
            states, [&]<class Rule>(Rule*) { run_chunks<T, Rule>(config, storage, tensors); });
        STD_TORCH_CHECK(known, "the rule cannot have ", states, " states per weight with these options");
      });
    });
    for (const FlatTensor& tensor : tensors) count_step(tensor);
  }
};

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CPU, m) {
  m.impl("make_bucket", TORCH_BOX(&flatout::make_bucket<flatout::CpuBucket>));
}
