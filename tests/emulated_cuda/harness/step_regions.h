// step_regions.h: the regions of memory of an optimizer step, and their addresses for a launcher.
#pragma once

#include <array>

#include "core/chunks.h"
#include "numbers.h"
#include "scaling/conclusion.h"
#include "step_test.h"

namespace harness {

// Region of a tensor's stream. The step count comes after the streams.
inline std::size_t region(std::size_t tensor, int stream) {
  return tensor * (flatout::kMaxStreams + 1) + static_cast<std::size_t>(stream);
}
inline constexpr int kCount = flatout::kMaxStreams;

// Regions after those of the tensors.
enum Common { kLr, kLastLr, kGradFactor, kFoundInf, kGradNorm, kFinished, kPartials, kTable, kCommon };
inline std::size_t common(const StepTest& test, Common which) { return region(test.sizes.size(), 0) + which; }

inline Region scalar_of(double value, Where where) {
  if (where == Where::kHost) return {};
  return where == Where::kDouble ? region_of<double>({value}) : region_of<float>({static_cast<float>(value)});
}

// Makes random tensors. Weights and gradients are around 0, states are valid for an optimizer, and codes are
// random bytes.
template <class T>
Regions make_regions(const StepTest& test) {
  using Acc = flatout::compute_t<T>;
  using flatout::Low;
  std::mt19937 random(1);
  const flatout::Storage& storage = test.storage;
  const int states = test.optimizer.states(), average = 2 + states, low = 3 + states;
  Regions regions(common(test, kCommon));
  uint32_t chunks = 0;
  for (std::size_t t = 0; t < test.sizes.size(); ++t) {
    const int64_t count = test.sizes[t];
    chunks += flatout::chunks_of(count);
    const auto numbers = [&](int stream, double least, double most) {
      const std::size_t beside = stream == 1 ? test.grad_misalignment : test.misalignment;
      regions[region(t, stream)] =
          storage.is_wide(stream)
              ? region_of(random_numbers<Acc>(count, least, most, random), beside * sizeof(Acc))
              : region_of(random_numbers<T>(count, least, most, random), beside * sizeof(T));
    };
    numbers(0, -1, 1);
    numbers(1, -2, 2);
    if (test.has_infinity && t + 1 == test.sizes.size()) {
      std::vector<char>& bytes = regions[region(t, 1)].bytes;
      const Region infinity = storage.is_wide(1) ? region_of<Acc>({nearest<Acc>(INFINITY)})
                                                 : region_of<T>({nearest<T>(INFINITY)});
      std::copy(infinity.bytes.begin(), infinity.bytes.end(),
                bytes.end() - static_cast<std::ptrdiff_t>(infinity.bytes.size()));
    }
    for (int s = 0; s < states; ++s) {
      if (storage.codes) {
        std::vector<uint8_t> codes(static_cast<std::size_t>(count));
        for (uint8_t& code : codes)
          code = static_cast<uint8_t>(s == 0 ? random() % 256 : 64 + random() % 192);
        const int64_t blocks = (count + flatout::kDynamicBlock - 1) / flatout::kDynamicBlock;
        regions[region(t, 2 + s)] = region_of(codes, test.misalignment);
        regions[region(t, 4 + states + s)] = region_of(random_numbers<float>(blocks, 0.5, 1, random));
      } else {
        numbers(2 + s, s == 0 ? -1 : 0.1, 1);
      }
    }
    if (storage.average) numbers(average, -1, 1);
    if (storage.low == Low::kCopy) numbers(low, -1, 1);
    if (storage.low == Low::kRemainder) {
      std::vector<int16_t> rest(static_cast<std::size_t>(count));
      for (int16_t& one : rest) one = static_cast<int16_t>(random());
      regions[region(t, low)] = region_of(rest, test.misalignment * sizeof(int16_t));
    }
    if (test.counts_steps)
      regions[region(t, kCount)] =
          scalar_of(static_cast<double>(t % 3), test.count_is_double ? Where::kDouble : Where::kFloat);
  }
  const bool checks = test.max_norm >= 0;
  regions[common(test, kLr)] = scalar_of(test.optimizer.lr, test.lr);
  regions[common(test, kLastLr)] = scalar_of(test.optimizer_of(1).lr, test.last_lr);
  regions[common(test, kGradFactor)] = scalar_of(test.grad_factor, checks ? Where::kDouble : test.factor);
  if (checks || test.found_inf)
    regions[common(test, kFoundInf)] = region_of<float>({test.found_inf.value_or(0)});
  if (checks) {
    regions[common(test, kGradNorm)] = scalar_of(0, Where::kDouble);
    regions[common(test, kFinished)] = region_of<uint32_t>({0});
    regions[common(test, kPartials)] = region_of(std::vector<flatout::Partial>(chunks));
  }
  return regions;
}

inline std::vector<flatout::FlatTensor> flat_tensors(const StepTest& test, const Memory& memory) {
  std::vector<flatout::FlatTensor> tensors(test.sizes.size());
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    for (int s = 0; s < flatout::kMaxStreams; ++s) tensors[t].address[s] = memory.at(region(t, s));
    tensors[t].step = memory.at(region(t, kCount));
    tensors[t].numel = test.sizes[t];
    tensors[t].id = static_cast<uint32_t>(t + 100);
    tensors[t].step_is_double = test.count_is_double;
    tensors[t].group = static_cast<uint8_t>(StepTest::group_of(t));
  }
  return tensors;
}

inline flatout::DeviceScalar device_scalar(const StepTest& test, const Memory& memory, Common which,
                                           Where where, double value) {
  return {memory.at(common(test, which)), where == Where::kDouble, value};
}

inline flatout::StepConfig step_config(const StepTest& test, const Memory& memory) {
  flatout::StepConfig config;
  const Where factor = test.max_norm >= 0 ? Where::kDouble : test.factor;
  const Optimizer first = test.optimizer_of(0), last = test.optimizer_of(1);
  config.group[0] = {device_scalar(test, memory, kLr, test.lr, first.lr), first.weight_decay};
  config.group[StepTest::group_of(1)] = {device_scalar(test, memory, kLastLr, test.last_lr, last.lr),
                                         last.weight_decay};
  config.grad_factor = device_scalar(test, memory, kGradFactor, factor, test.grad_factor);
  config.found_inf = memory.at<float>(common(test, kFoundInf));
  config.maximize = test.optimizer.maximize;
  config.unscale_grads = test.unscales_grads;
  config.ema_decay = test.ema_decay;
  config.stochastic = test.stochastic;
  config.seed = 42;
  return config;
}

// Returns the conclusion of the check of the step's gradients.
inline flatout::Conclusion conclusion_of(const StepTest& test, const Memory& memory, const Regions& regions) {
  const auto chunks = regions[common(test, kPartials)].bytes.size() / sizeof(flatout::Partial);
  return {memory.at<flatout::Partial>(common(test, kPartials)),
          static_cast<uint32_t>(chunks),
          {memory.at<uint32_t>(common(test, kFinished)), 0},
          {{nullptr, false, test.grad_factor}, {}},
          test.max_norm,
          {memory.at<float>(common(test, kFoundInf)), memory.at(common(test, kGradNorm)),
           memory.at(common(test, kGradFactor)), true}};
}
inline std::vector<flatout::FlatTensor> gradients_of(std::vector<flatout::FlatTensor> tensors) {
  for (flatout::FlatTensor& tensor : tensors) tensor.address[0] = tensor.address[1];
  return tensors;
}

}  // namespace harness
