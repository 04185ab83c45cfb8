// step_definition.h: compares the memory after a step with the optimizer's definition.
#pragma once

#include "codes.h"
#include "step_regions.h"

namespace harness {

// Streams of a step's regions as numbers.
template <class T>
class Streams {
 public:
  using Acc = flatout::compute_t<T>;

  Streams(const StepTest& test, const Regions& regions) : test_(test), regions_(regions) {}

  double number(std::size_t t, int s, int64_t i) const {
    const int states = test_.optimizer.states();
    const Region& stream = regions_[region(t, s)];
    if (test_.storage.is_code(s, states)) return multiple_of(code(t, s, i), s == 2) * absmax(t, s, i);
    if (test_.storage.is_wide(s)) return number_of(elements<Acc>(stream)[i]);
    if (s == 0 && test_.storage.low == flatout::Low::kRemainder) return joined(t, i);
    return number_of(elements<T>(stream)[i]);
  }
  uint8_t code(std::size_t t, int s, int64_t i) const { return elements<uint8_t>(regions_[region(t, s)])[i]; }
  double absmax(std::size_t t, int s, int64_t i) const {
    const int stream = 4 + test_.optimizer.states() + (s - 2);
    return elements<float>(regions_[region(t, stream)])[i / flatout::kDynamicBlock];
  }
  const Region& stream(std::size_t t, int s) const { return regions_[region(t, s)]; }
  // Returns the count before or after a step. Without counts, returns 1, so that no step is the first one.
  double count(std::size_t t) const {
    const Region& count = regions_[region(t, kCount)];
    if (count.bytes.empty()) return 1;
    return test_.count_is_double ? *elements<double>(count) : *elements<float>(count);
  }
  double scalar(Common which, Where where, double otherwise) const {
    const Region& scalar = regions_[common(test_, which)];
    if (scalar.bytes.empty()) return otherwise;
    return where == Where::kDouble ? *elements<double>(scalar) : *elements<float>(scalar);
  }

 private:
  double joined(std::size_t t, int64_t i) const {
    const auto high = elements<flatout::bf16>(regions_[region(t, 0)])[i].bits;
    const auto rest = elements<int16_t>(regions_[region(t, 3 + test_.optimizer.states())])[i];
    const auto word = static_cast<uint32_t>((int64_t{high} << 16) + rest);
    float weight;
    std::memcpy(&weight, &word, sizeof weight);
    return weight;
  }

  const StepTest& test_;
  const Regions& regions_;
};

template <class T>
class DefinitionCheck {
 public:
  using Acc = flatout::compute_t<T>;

  DefinitionCheck(const StepTest& test, const Regions& before, const Regions& after, Report& report)
      : test_(test), before_(test, before), after_(test, after), report_(report) {}

  void run() {
    const Where where = test_.max_norm >= 0 ? Where::kDouble : test_.factor;
    factor_ = after_.scalar(kGradFactor, where, test_.grad_factor);
    const bool skips = after_.scalar(kFoundInf, Where::kFloat, 0) != 0;
    for (std::size_t t = 0; t < test_.sizes.size(); ++t) {
      const double counted = after_.count(t) - before_.count(t);
      if (test_.counts_steps && counted != (skips ? 0 : 1))
        fail("count", t, 0, after_.count(t), before_.count(t));
      for (int s = 0; skips && s < flatout::kMaxStreams; ++s)
        report_.expect(s == 1 || before_.stream(t, s) == after_.stream(t, s),
                       "a skipped step has changed a stream");
      for (int64_t i = 0; i < test_.sizes[t]; ++i) {
        check_gradient(t, i);
        if (!skips) check_element(t, i);
      }
    }
    // Stochastic rounding has no bias. The mean of n errors, each below one unit, is within 5 / (2 sqrt(n))
    // units.
    if (test_.stochastic && rounded_ > 1000 && !(std::abs(error_) <= 2.5 * std::sqrt(rounded_)))
      report_.fail("stochastic rounding has a bias of " + std::to_string(error_ / rounded_));
  }

 private:
  void check_gradient(std::size_t t, int64_t i) {
    const double old = before_.number(t, 1, i);
    expect_near("gradient", t, 1, i, after_.number(t, 1, i), test_.unscales_grads ? old * factor_ : old);
  }

  void check_element(std::size_t t, int64_t i) {
    const flatout::Storage& storage = test_.storage;
    const int states = test_.optimizer.states();
    double x[2 + flatout::kMaxStates];
    for (int s = 0; s < 2 + states; ++s) x[s] = before_.number(t, s, i);
    x[1] *= factor_;
    if (test_.optimizer.is_ambiguous(x)) return;
    test_.optimizer_of(t).step(x, before_.count(t) + 1);
    expect_near("weight", t, 0, i, after_.number(t, 0, i), x[0]);
    for (int s = 2; s < 2 + states; ++s) {
      if (storage.codes) {
        check_code(t, s, i, x[s]);
      } else {
        expect_near("state", t, s, i, after_.number(t, s, i), x[s]);
      }
    }
    if (storage.average) {
      const double old = before_.number(t, 2 + states, i);
      const double average = test_.ema_decay * old + (1 - test_.ema_decay) * x[0];
      expect_near("average", t, 2 + states, i, after_.number(t, 2 + states, i), average);
    }
    if (storage.low == flatout::Low::kCopy) {
      const double copy = after_.number(t, 3 + states, i);
      if (!is_near(copy, x[0], rounding_error<T>())) fail("copy", t, i, copy, x[0]);
    }
  }

  void check_code(std::size_t t, int s, int64_t i, double state) {
    const double absmax = after_.absmax(t, s, i);
    if (!(std::abs(state) <= absmax * 1.00001)) fail("absmax", t, i, absmax, state);
    if (!is_nearest_code(after_.code(t, s, i), state / absmax, s == 2))
      fail("code", t, i, after_.number(t, s, i), state);
  }

  void expect_near(const char* name, std::size_t t, int s, int64_t i, double got, double expected) {
    const bool remainder = s == 0 && test_.storage.low == flatout::Low::kRemainder;
    const bool narrow = !test_.storage.is_wide(s) && !remainder;
    const bool by_chance = narrow && test_.stochastic && s != 1;
    double rounding = narrow ? rounding_error<T>() : rounding_error<Acc>();
    if (by_chance) rounding *= 2;  // up or down
    if (by_chance && std::abs(expected) > 1e-3) {
      const double unit = std::ldexp(1, std::ilogb(expected) + 1 - kDigits<T>);
      error_ += (got - expected) / unit;
      rounded_ += 1;
    }
    if (!is_near(got, expected, rounding)) fail(name, t, i, got, expected);
  }

  // Allows the error of the last rounding, and 16 rounding errors of the computation, relative to 1 +
  // expected.
  static bool is_near(double got, double expected, double rounding) {
    const double computing = 16 * rounding_error<Acc>() * (1 + std::abs(expected));
    if (std::isnan(expected)) return std::isnan(got);
    return got == expected || std::abs(got - expected) <= 2 * rounding * std::abs(expected) + computing;
  }

  void fail(const char* name, std::size_t t, int64_t i, double got, double expected) {
    char text[160];
    std::snprintf(text, sizeof text, "%s[%zu][%lld] is %.9g, by definition %.9g", name, t,
                  static_cast<long long>(i), got, expected);
    report_.fail(text);
  }

  const StepTest& test_;
  const Streams<T> before_, after_;
  Report& report_;
  double factor_ = 1, error_ = 0, rounded_ = 0;
};

}  // namespace harness
