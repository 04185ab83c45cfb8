// norms_cases.cpp: compares the norm of each gradient on a device with plain loops, and with the same threads
// on the host.
#include <cmath>

#include "cases.h"
#include "host.h"
#include "memory.h"
#include "numbers.h"
#include "scaling/check_launch.h"
#include "stream.h"

namespace harness {

using namespace flatout;

namespace {

struct NormsTest {
  std::vector<int64_t> sizes;
  Norm norm = Norm::kTwo;
  bool writes_empty = true, is_wide = false;
  double bad = 0;  // replaces the last element, unless 0
  std::size_t misalignment = 0;
};

enum Common : std::size_t { kInverse, kPartials, kNorms, kCommon };
constexpr float kScale = 0.25f;
constexpr double kUnwritten = 7;

template <class T>
Regions make_regions(const NormsTest& test) {
  std::mt19937 random(5);
  Regions regions(kCommon);
  uint32_t chunks = 0;
  for (const int64_t size : test.sizes) chunks += chunks_of(size);
  regions[kInverse] = region_of<float>({kScale});
  regions[kPartials] = region_of(std::vector<Partial>(chunks, {NAN, NAN}));
  regions[kNorms] = test.is_wide ? region_of(std::vector<double>(test.sizes.size(), kUnwritten))
                                 : region_of(std::vector<float>(test.sizes.size(), kUnwritten));
  for (const int64_t size : test.sizes) {
    std::vector<T> numbers = random_numbers<T>(size, -3, 3, random);
    if (test.bad != 0 && regions.size() + 1 == kCommon + test.sizes.size())
      numbers.back() = nearest<T>(test.bad);
    regions.push_back(region_of(numbers, test.misalignment * sizeof(T)));
  }
  return regions;
}

Norms norms_of(const NormsTest& test, const Memory& memory) {
  return {memory.at<Partial>(kPartials),
          {},
          {memory.at(kInverse), false, 0},
          memory.at(kNorms),
          test.is_wide,
          test.writes_empty};
}

std::vector<FlatTensor> tensors_of(const NormsTest& test, const Memory& memory) {
  std::vector<FlatTensor> tensors(test.sizes.size());
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    tensors[t].address[0] = memory.at(kCommon + t);
    tensors[t].numel = test.sizes[t];
  }
  return tensors;
}

template <class T>
double definition(Norm norm, const Region& region, int64_t size) {
  double result = 0;
  for (int64_t i = 0; i < size; ++i) {
    const double magnitude = std::abs(number_of(elements<T>(region)[i]) * kScale);
    if (norm == Norm::kOne) result += magnitude;
    if (norm == Norm::kTwo) result += magnitude * magnitude;
    if (norm == Norm::kInf && !(magnitude <= result)) result = magnitude;
  }
  return norm == Norm::kTwo ? std::sqrt(result) : result;
}

template <class T>
void run_norms(const NormsTest& test, Report& report) {
  const Regions before = make_regions<T>(test);
  const Stream stream(0);
  const Memory device(before, Memory::Place::kDevice), host(before, Memory::Place::kHost);
  launch_norms<T>(tensors_of(test, device), test.norm, norms_of(test, device), stream);
  norms_on_host<T>(tensors_of(test, host), test.norm, norms_of(test, host));
  stream.synchronize();
  const Regions after = device.read();
  report.expect(after == host.read(), "the host's bits differ");
  for (std::size_t t = 0; t < test.sizes.size(); ++t) {
    const bool is_written = test.sizes[t] != 0 || test.writes_empty;
    const double expected =
        is_written ? definition<T>(test.norm, before[kCommon + t], test.sizes[t]) : kUnwritten;
    const double got = test.is_wide ? elements<double>(after[kNorms])[t] : elements<float>(after[kNorms])[t];
    const bool is_near = got == expected || (std::isnan(got) && std::isnan(expected)) ||
                         std::abs(got - expected) <= 1e-5 * expected;
    if (!is_near) report.fail("norm " + std::to_string(t) + " is " + std::to_string(got));
  }
}

template <class T>
void add_cases_of(std::vector<Case>& cases, bool is_small) {
  const std::vector<int64_t> sizes{5, 0, 2 * int64_t{kChunk} + 77, 300, int64_t{kChunk}, 1};
  const auto add = [&](const std::string& name, NormsTest test) {
    cases.push_back({"norms " + name + ", " + kName<T>, is_small,
                     [test](Report& report) { run_norms<T>(test, report); }});
  };
  add("of order 1", {.sizes = sizes, .norm = Norm::kOne});
  add("of order 2, in float64", {.sizes = sizes, .is_wide = true});
  add("of order 2, misaligned, beside other dtypes",
      {.sizes = sizes, .writes_empty = false, .misalignment = 1});
  add("of order inf", {.sizes = sizes, .norm = Norm::kInf});
  add("with NaN", {.sizes = sizes, .norm = Norm::kInf, .bad = NAN});
  add("with infinity", {.sizes = sizes, .bad = -INFINITY});
  add("of nothing", {.sizes = {0, 0}});
}

}  // namespace

void add_norms_cases(std::vector<Case>& cases) {
  add_cases_of<float>(cases, true);
  add_cases_of<double>(cases, false);
  add_cases_of<f16>(cases, false);
  add_cases_of<bf16>(cases, false);
  NormsTest many{.sizes = std::vector<int64_t>(2500)};  // two launches; a block takes milliseconds
  for (std::size_t t = 0; t < many.sizes.size(); t += 12) many.sizes[t] = 3;
  cases.push_back(
      {"norms of 2,500 tensors, float32", false, [many](Report& report) { run_norms<float>(many, report); }});
  const NormsTest large{.sizes = {7, 300 * int64_t{kChunk}}};  // several partials per lane, loaded at once
  cases.push_back(
      {"norms of 300 chunks, bfloat16", false, [large](Report& report) { run_norms<bf16>(large, report); }});
}

}  // namespace harness
