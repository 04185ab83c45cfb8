// check_cases.cpp: checks, scaling and writes on a device, compared with plain loops and with the same
// threads on the host.
#include <tuple>
#include <utility>

#include "cases.h"
#include "host.h"
#include "memory.h"
#include "numbers.h"
#include "optim/step_launch.h"
#include "scaling/check_launch.h"
#include "stream.h"

namespace harness {

using namespace flatout;

namespace {

// Gradients of one dtype. A check without rewriting also takes all four dtypes together.
struct CheckTest {
  std::vector<int64_t> sizes;
  Norm norm = Norm::kTwo;
  bool rewrites = false;
  double inv_scale = 0.5, max_norm = -1;
  double bad = 0;  // value of the last gradient; 0: no change
  std::size_t misalignment = 0;
  bool scale_is_double = false, is_wide = true, has_own_counter = false;
  // Updates since the last change of the loss scale, which grows after 3. < 0: no loss scale, inv_scale is
  // given.
  int32_t growth_tracker = -1;
  int device = 0;

  bool has_loss_scale() const { return growth_tracker >= 0; }
};

constexpr double kGrowthFactor = 3.3, kBackoffFactor = 0.7;
constexpr int32_t kGrowthInterval = 3;

enum Common : std::size_t {
  kScale,
  kPartials,
  kFinished,
  kFoundInf,
  kGradNorm,
  kGradFactor,
  kTracker,
  kNextScale,
  kNextTracker,
  kSkipped,
  kCommon
};

template <class... Ts>
Regions make_regions(const CheckTest& test) {
  std::mt19937 random(2);
  Regions regions(kCommon);
  const auto scalar = [](double value, bool is_double) {
    return is_double ? region_of<double>({value}) : region_of<float>({static_cast<float>(value)});
  };
  uint32_t chunks = 0;
  for (const int64_t size : test.sizes) chunks += chunks_of(size) * sizeof...(Ts);
  regions[kScale] = scalar(test.has_loss_scale() ? 1 / test.inv_scale : test.inv_scale, test.scale_is_double);
  regions[kPartials] = region_of(std::vector<Partial>(chunks, {NAN, NAN}));
  regions[kFinished] = region_of<uint32_t>({0});
  regions[kFoundInf] = region_of<float>({7});
  regions[kGradNorm] = regions[kGradFactor] = scalar(7, test.is_wide);
  regions[kTracker] = region_of<int32_t>({test.growth_tracker});
  regions[kNextScale] = region_of<float>({7});
  regions[kNextTracker] = region_of<int32_t>({7});
  regions[kSkipped] = region_of<char>({7});
  const auto add = [&]<class T>(T*) {
    for (const int64_t size : test.sizes)
      regions.push_back(region_of(random_numbers<T>(size, -3, 3, random), test.misalignment * sizeof(T)));
  };
  (add(static_cast<Ts*>(nullptr)), ...);
  if (test.bad != 0) {
    using Last = std::tuple_element_t<sizeof...(Ts) - 1, std::tuple<Ts...>>;
    Region& last = regions.back();
    const Region bad = region_of<Last>({nearest<Last>(test.bad)});
    std::copy(bad.bytes.begin(), bad.bytes.end(), last.bytes.end() - sizeof(Last));
  }
  return regions;
}

// Calls body(tensors, first partial) with the list of each type.
template <class... Ts, class Body>
void for_each_list(const CheckTest& test, const Memory& memory, const Body& body) {
  std::size_t region = kCommon;
  uint32_t first_partial = 0;
  const auto visit = [&]<class T>(T* type) {
    std::vector<FlatTensor> tensors(test.sizes.size());
    uint32_t chunks = 0;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      tensors[t].address[0] = memory.at(region++);
      tensors[t].numel = test.sizes[t];
      chunks += chunks_of(test.sizes[t]);
    }
    body(type, tensors, first_partial);
    first_partial += chunks;
  };
  (visit(static_cast<Ts*>(nullptr)), ...);
}

Conclusion conclusion_of(const CheckTest& test, const Memory& memory, const Regions& regions) {
  Unscaling unscaling{{memory.at(kScale), test.scale_is_double, 0}, {}};
  if (test.has_loss_scale())
    unscaling.loss_scale = {memory.at<float>(kScale),
                            memory.at<int32_t>(kTracker),
                            memory.at<float>(kNextScale),
                            memory.at<int32_t>(kNextTracker),
                            memory.at<bool>(kSkipped),
                            kGrowthFactor,
                            kBackoffFactor,
                            kGrowthInterval};
  return {memory.at<Partial>(kPartials),
          static_cast<uint32_t>(regions[kPartials].bytes.size() / sizeof(Partial)),
          {memory.at<uint32_t>(kFinished), 0},
          unscaling,
          test.max_norm,
          {memory.at<float>(kFoundInf), memory.at(kGradNorm), memory.at(kGradFactor), test.is_wide}};
}

double scalar(const Region& region) {
  return region.bytes.size() == 8 ? *elements<double>(region) : *elements<float>(region);
}

bool is_near(double got, double expected, double error) {
  return got == expected || (std::isnan(got) && std::isnan(expected)) ||
         std::abs(got - expected) <= error * std::abs(expected);
}

// Checks the next loss scale by the documentation of torch.amp.GradScaler.
void check_next_scale(const CheckTest& test, bool is_finite, const Regions& after, Report& report) {
  const auto scale = static_cast<float>(1 / test.inv_scale);
  const bool grows = is_finite && test.growth_tracker + 1 == kGrowthInterval;
  const bool can_grow = std::isfinite(static_cast<float>(scale * kGrowthFactor));
  const double factor = is_finite ? (grows && can_grow ? kGrowthFactor : 1) : kBackoffFactor;
  report.expect(*elements<float>(after[kNextScale]) == static_cast<float>(scale * factor),
                "the next scale is wrong");
  report.expect(
      *elements<int32_t>(after[kNextTracker]) == (grows || !is_finite ? 0 : test.growth_tracker + 1),
      "the next growth tracker is wrong");
  report.expect(*elements<char>(after[kSkipped]) == (is_finite ? 0 : 1), "skipped is wrong");
}

// Checks the verdict and the gradients by plain loops in double.
template <class... Ts>
void check_definition(const CheckTest& test, const Regions& before, const Regions& after, Report& report) {
  double norm = 0;
  bool is_finite = true;
  std::size_t region = kCommon;
  const auto visit = [&]<class T>(T*) {
    for (const int64_t size : test.sizes) {
      for (int64_t i = 0; i < size; ++i) {
        const double old = number_of(elements<T>(before[region])[i]);
        const double gradient = old * test.inv_scale, magnitude = std::abs(gradient);
        is_finite = is_finite && std::isfinite(gradient);
        if (test.norm == Norm::kOne) norm += magnitude;
        if (test.norm == Norm::kTwo) norm += magnitude * magnitude;
        if (test.norm == Norm::kInf && !(magnitude <= norm)) norm = magnitude;
        const double now = number_of(elements<T>(after[region])[i]);
        const double expected = test.rewrites ? number_of(nearest<T>(gradient)) : old;
        if (!is_near(now, expected, 0)) report.fail("a gradient is " + std::to_string(now));
      }
      ++region;
    }
  };
  (visit(static_cast<Ts*>(nullptr)), ...);
  if (test.norm == Norm::kTwo) norm = std::sqrt(norm);
  const double factor = test.max_norm < 0 || test.max_norm > norm + 1e-6
                            ? test.inv_scale
                            : test.inv_scale * (test.max_norm / (norm + 1e-6));
  constexpr double kError = 1e-5;  // sums of a chunk are in float
  report.expect(scalar(after[kFoundInf]) == (is_finite ? 0 : 1), "found_inf is wrong");
  report.expect(is_near(scalar(after[kGradNorm]), norm, kError), "grad_norm is wrong");
  report.expect(is_near(scalar(after[kGradFactor]), factor, kError), "grad_factor is wrong");
  if (test.has_loss_scale()) check_next_scale(test, is_finite, after, report);
}

template <class... Ts>
void run_check(const CheckTest& test, Report& report) {
  const Regions before = make_regions<Ts...>(test);
  const Stream stream(test.device);
  const Memory device(before, Memory::Place::kDevice), host(before, Memory::Place::kHost);
  Conclusion on_device = conclusion_of(test, device, before);
  const Conclusion on_host = conclusion_of(test, host, before);
  if (!test.has_own_counter) on_device.finished = {};
  if (on_device.chunks == 0) launch_conclusion(on_device, stream);
  for_each_list<Ts...>(test, device, [&]<class T>(T*, const auto& tensors, uint32_t first) {
    launch_check<T>(tensors, test.norm, test.rewrites, on_device, first, stream);
  });
  if (on_host.chunks == 0) on_host.write<Norm::kTwo>({0, 0});
  for_each_list<Ts...>(test, host, [&]<class T>(T*, const auto& tensors, uint32_t first) {
    check_on_host<T>(tensors, test.norm, test.rewrites, on_host, first);
  });
  stream.synchronize();
  const Regions after = device.read();
  report.expect(after == host.read(), "the host's bits differ");
  check_definition<Ts...>(test, before, after, report);
}

template <class T>
void run_scale(const CheckTest& test, Report& report) {
  const Regions before = make_regions<T>(test);
  const Stream stream(test.device);
  const Memory device(before, Memory::Place::kDevice), host(before, Memory::Place::kHost);
  for_each_list<T>(test, device, [&](T*, const auto& tensors, uint32_t) {
    launch_scale<T>(tensors, {device.at(kScale), test.scale_is_double, 0}, stream);
  });
  for_each_list<T>(test, host, [&](T*, const auto& tensors, uint32_t) {
    scale_on_host<T>(tensors, {host.at(kScale), test.scale_is_double, 0});
  });
  stream.synchronize();
  const Regions after = device.read();
  report.expect(after == host.read(), "the host's bits differ");
  for (std::size_t t = 0; t < test.sizes.size(); ++t)
    for (int64_t i = 0; i < test.sizes[t]; ++i) {
      const double now = number_of(elements<T>(after[kCommon + t])[i]);
      const double gradient = number_of(elements<T>(before[kCommon + t])[i]) * test.inv_scale;
      if (!is_near(now, number_of(nearest<T>(gradient)), 0))
        report.fail("a gradient is " + std::to_string(now));
    }
}

void run_write(std::size_t bytes, Report& report) {
  std::mt19937 random(3);
  std::vector<char> source(bytes);
  for (char& byte : source) byte = static_cast<char>(random());
  const Stream stream(0);
  const Memory memory({region_of(std::vector<char>(bytes))}, Memory::Place::kDevice);
  launch_write(memory.at(0), source.data(), bytes, stream);
  const std::vector<char> expected =
      std::exchange(source, std::vector<char>(bytes));  // the host may change them at once
  stream.synchronize();
  report.expect(memory.read()[0].bytes == expected, "the bytes differ");
}

template <class T>
void add_cases_of(std::vector<Case>& cases, bool is_small) {
  constexpr int64_t kChunk = flatout::kChunk;
  const std::vector<int64_t> sizes{5, 0, 2 * kChunk + 77, 300, kChunk, 1};
  const auto add = [&](const std::string& name, CheckTest test) {
    cases.push_back(
        {"check " + name + " " + kName<T>, is_small, [test](Report& report) { run_check<T>(test, report); }});
  };
  const char* norms[] = {"1-norm", "2-norm", "max norm"};
  for (const Norm norm : {Norm::kOne, Norm::kTwo, Norm::kInf}) {
    const std::string name = norms[static_cast<int>(norm)];
    add(name + ",", {.sizes = sizes, .norm = norm});
    add(name + ", clipped, misaligned,", {.sizes = sizes, .norm = norm, .max_norm = 1, .misalignment = 3});
    add(name + ", with NaN,", {.sizes = sizes, .norm = norm, .max_norm = 1, .bad = NAN});
    add(name + ", with infinity,", {.sizes = sizes, .norm = norm, .bad = -INFINITY, .scale_is_double = true});
  }
  add("rewrite,", {.sizes = sizes, .rewrites = true});
  add("rewrite, misaligned, clipped,",
      {.sizes = sizes, .rewrites = true, .max_norm = 1e9, .misalignment = 1});
  add("rewrite with infinity,", {.sizes = sizes, .rewrites = true, .bad = INFINITY, .is_wide = false});
  add("rewrite by 1,", {.sizes = sizes, .rewrites = true, .inv_scale = 1});
  add("nothing,", {.sizes = {0, 0}, .max_norm = 1});
  add("loss scale,", {.sizes = sizes, .inv_scale = 1 / 3.7, .max_norm = 1, .growth_tracker = 1});
  add("loss scale that grows,", {.sizes = sizes, .growth_tracker = 2});
  add("loss scale that cannot grow,",
      {.sizes = {300}, .norm = Norm::kOne, .inv_scale = 0x1p-127, .growth_tracker = 2});
  add("loss scale of infinity,", {.sizes = sizes, .max_norm = 1, .bad = INFINITY, .growth_tracker = 2});
  add("loss scale of nothing,", {.sizes = {0}, .growth_tracker = 2});
  for (const std::size_t misalignment : {0, 1})
    for (const double factor : {0.25, 1.0}) {
      const CheckTest test{.sizes = sizes, .inv_scale = factor, .misalignment = misalignment};
      cases.push_back(
          {"scale by " + std::to_string(factor) + (misalignment == 0 ? " " : ", misaligned, ") + kName<T>,
           is_small, [test](Report& report) { run_scale<T>(test, report); }});
    }
}

}  // namespace

void add_check_cases(std::vector<Case>& cases) {
  add_cases_of<float>(cases, true);
  add_cases_of<double>(cases, false);
  add_cases_of<f16>(cases, false);
  add_cases_of<bf16>(cases, false);
  const auto add_mixed = [&](const std::string& name, CheckTest test) {
    cases.push_back({"check " + name, true,
                     [test](Report& report) { run_check<float, double, f16, bf16>(test, report); }});
  };
  add_mixed("all dtypes in one verdict", {.sizes = {300, 40000, 7}, .max_norm = 3});
  add_mixed("on the last device", {.sizes = {300, 40000}, .is_wide = false, .device = last_device()});
  add_mixed("with a counter that is not kept", {.sizes = {300, 40000}, .has_own_counter = true});
  CheckTest many{.sizes = std::vector<int64_t>(4700),
                 .max_norm = 1};  // most are empty: a block takes milliseconds
  for (std::size_t t = 0; t < many.sizes.size(); t += 12) many.sizes[t] = 3;
  cases.push_back({"check 4,700 tensors, three launches, float32", false,
                   [many](Report& report) { run_check<float>(many, report); }});
  for (const std::size_t bytes : {4, 2048, 32700, 32704, 100004})
    cases.push_back({"write " + std::to_string(bytes) + " bytes", true,
                     [bytes](Report& report) { run_write(bytes, report); }});
}

}  // namespace harness
