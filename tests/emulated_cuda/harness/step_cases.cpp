// step_cases.cpp: cases of optimizer steps, for every rule with every dtype and storage, and for the options
// of a step.
#include "numbers.h"
#include "step_test.h"
#include "stream.h"

namespace harness {

using flatout::Low;
using flatout::RuleName;

namespace {

constexpr int64_t kChunk = flatout::kChunk;

struct Rule {
  const char* name;
  Optimizer optimizer;
  const char* small_dtype;  // the only dtype of the small set
};

std::vector<Rule> rules() {
  return {
      {"adam", {.rule = RuleName::kAdam}, "bfloat16"},
      {"adamw", {.rule = RuleName::kAdam, .is_decoupled = true}, "float32"},
      {"amsgrad",
       {.rule = RuleName::kAdam, .is_decoupled = true, .amsgrad = true, .maximize = true},
       "float16"},
      {"sgd", {.rule = RuleName::kSgd}, "float64"},
      {"sgd_dampening", {.rule = RuleName::kSgd, .momentum = 0.9, .dampening = 0.5}, "float32"},
      {"sgd_nesterov",
       {.rule = RuleName::kSgd, .momentum = 0.9, .nesterov = true, .maximize = true},
       "float16"},
      {"lion", {.rule = RuleName::kLion}, "bfloat16"},
  };
}

// Bits of Storage::wide.
constexpr uint32_t kWeight = 1, kGradient = 2;
uint32_t states_of(int states) { return ((1u << states) - 1) << 2; }
uint32_t average_of(int states) { return 4u << states; }

struct NamedStorage {
  const char* name;
  flatout::Storage storage;
  bool stochastic = false;
};

// Returns all storages of tensors whose narrowest type is T.
template <class T>
std::vector<NamedStorage> storages(int states) {
  constexpr bool kIsNarrow = sizeof(T) == 2, kIsBfloat = std::is_same_v<T, flatout::bf16>;
  const uint32_t wide_states = states_of(states), average = average_of(states);
  const uint32_t all = kWeight | kGradient | wide_states;
  const uint32_t own = kIsNarrow ? 0 : all;  // wide, because the compute type is T
  std::vector<NamedStorage> kinds{
      {"plain", {own, false, Low::kNone, false}},
      {"average", {own | average, true, Low::kNone, false}},
  };
  const auto add = [&](const char* name, uint32_t wide, bool has_average, Low low, bool codes,
                       bool stochastic) {
    kinds.push_back({name, {wide | (has_average ? average : 0), has_average, low, codes}, stochastic});
  };
  const bool has_codes = states != 0 && !std::is_same_v<T, double>;
  if (has_codes) add("codes", own & ~wide_states, false, Low::kNone, true, false);
  if (has_codes) add("codes, average", own & ~wide_states, true, Low::kNone, true, false);
  if (!kIsNarrow) return kinds;
  add("wide states", wide_states, false, Low::kNone, false, false);
  add("wide weights", kWeight | wide_states, false, Low::kNone, false, false);
  add("copy", kWeight | wide_states, false, Low::kCopy, false, false);
  add("copy, wide gradients, average", all, true, Low::kCopy, false, false);
  if (has_codes) add("codes, copy", kWeight | kGradient, false, Low::kCopy, true, false);
  if (!kIsBfloat) return kinds;
  add("remainder", wide_states, false, Low::kRemainder, false, false);
  add("remainder, average", wide_states, true, Low::kRemainder, false, false);
  add("random", 0, false, Low::kNone, false, true);
  add("random, wide states, average", wide_states, true, Low::kNone, false, true);
  if (has_codes) add("random codes", 0, false, Low::kNone, true, true);
  if (has_codes) add("remainder, codes", 0, false, Low::kRemainder, true, false);
  return kinds;
}

template <class T>
void add_case(std::vector<Case>& cases, const std::string& name, bool is_small, const StepTest& test) {
  cases.push_back(
      {name + " " + kName<T>, is_small, [test](Report& report) { run_step_test<T>(test, report); }});
}

// Adds cases of all rules with all storages. One rule also has cases with misaligned tensors.
template <class T>
void add_storages(std::vector<Case>& cases) {
  for (const Rule& rule : rules()) {
    const bool is_small = std::string(rule.small_dtype) == kName<T>;
    for (const NamedStorage& kind : storages<T>(rule.optimizer.states())) {
      StepTest test{.optimizer = rule.optimizer,
                    .sizes = {0, 5, 300, kChunk + 77, 1},
                    .storage = kind.storage,
                    .stochastic = kind.stochastic};
      test.factor = Where::kFloat;
      test.grad_factor = 0.5;
      const std::string name = std::string("step ") + rule.name + ", " + kind.name + ",";
      add_case<T>(cases, name, is_small, test);
      if (std::string(rule.name) != "adamw") continue;
      test.sizes = {3, kChunk + 77};
      test.misalignment = test.grad_misalignment = 1;
      add_case<T>(cases, name + " misaligned", false, test);
      test.misalignment = 0;
      test.unscales_grads = true;  // different threads update and unscale an element
      add_case<T>(cases, name + " misaligned gradients", is_small, test);
      test.misalignment = 3;
      test.grad_misalignment = 2;
      add_case<T>(cases, name + " misaligned apart", false, test);
      test.found_inf = 1;
      add_case<T>(cases, name + " skipped", false, test);
    }
  }
}

// Adds cases of the options of a step, for one rule and its plain storage.
template <class T>
void add_options(std::vector<Case>& cases, bool is_small) {
  const Optimizer adam{.rule = RuleName::kAdam, .is_decoupled = true};
  const StepTest plain{.optimizer = adam, .sizes = {kChunk + 5, 0, 77}, .storage = storages<T>(2)[0].storage};
  const auto add = [&](const std::string& name, const auto& change) {
    StepTest test = plain;
    change(test);
    add_case<T>(cases, "step " + name + ",", is_small, test);
  };
  add("no counts", [](StepTest& test) { test.counts_steps = false; });
  add("double counts, lr on the device", [](StepTest& test) {
    test.count_is_double = true;
    test.lr = Where::kDouble;
  });
  add("lr as float, unscaled gradients", [](StepTest& test) {
    test.lr = test.last_lr = Where::kFloat;
    test.factor = Where::kDouble;
    test.grad_factor = 0.25;
    test.unscales_grads = true;
  });
  for (const bool unscales : {false, true}) {
    const std::string name = unscales ? ", unscaled gradients" : "";
    add("found_inf 0" + name, [&](StepTest& test) {
      test.found_inf = 0;
      test.grad_factor = 0.5;
      test.unscales_grads = unscales;
    });
    add("found_inf 1" + name, [&](StepTest& test) {
      test.found_inf = 1;
      test.factor = Where::kFloat;
      test.grad_factor = 0.5;
      test.unscales_grads = unscales;
    });
    add("clipped" + name, [&](StepTest& test) {
      test.max_norm = 2;
      test.grad_factor = 0.5;
      test.unscales_grads = unscales;
    });
    add("clipped, infinite" + name, [&](StepTest& test) {
      test.max_norm = 2;
      test.has_infinity = true;
      test.unscales_grads = unscales;
    });
  }
  add("on the last device", [](StepTest& test) { test.device = last_device(); });
}

}  // namespace

void add_step_cases(std::vector<Case>& cases) {
  add_storages<float>(cases);
  add_storages<double>(cases);
  add_storages<flatout::f16>(cases);
  add_storages<flatout::bf16>(cases);
  add_options<float>(cases, true);
  add_options<double>(cases, false);
  add_options<flatout::f16>(cases, false);
  add_options<flatout::bf16>(cases, false);

  const Optimizer sgd{.rule = RuleName::kSgd, .momentum = 0.9, .dampening = 0.5};
  // Most tensors are empty, because emulation takes milliseconds for each block.
  StepTest many{
      .optimizer = sgd, .sizes = std::vector<int64_t>(9001), .storage = storages<float>(1)[0].storage};
  for (std::size_t t = 0; t < many.sizes.size(); t += 12) many.sizes[t] = static_cast<int64_t>(1 + t % 5);
  add_case<float>(cases, "step 9,001 tensors, three launches,", false, many);
  many.max_norm = 1;
  add_case<float>(cases, "step 9,001 tensors, clipped,", false, many);
  many.max_norm = -1;
  many.sizes.assign(4100, 0);
  many.max_norm = -1;
  add_case<float>(cases, "step 4,100 empty tensors,", true, many);
  StepTest large{
      .optimizer = sgd, .sizes = {20 * kChunk + 3, 2 * kChunk}, .storage = storages<float>(1)[0].storage};
  add_case<float>(cases, "step 23 chunks,", false, large);
}

}  // namespace harness
