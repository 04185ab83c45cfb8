// coded_cases.cpp: converts tensors into 8 bits and back on a device, and compares with the host.
#include "cases.h"
#include "memory.h"
#include "numbers.h"
#include "optim/dynamic8.h"
#include "optim/step_launch.h"
#include "stream.h"

namespace harness {

using namespace flatout;

namespace {

enum Region8 : std::size_t { kValues, kCodes, kAbsmax };

void encode_on_host(const Memory& memory, int64_t count, bool has_sign) {
  const auto encode = has_sign ? encode_blocks<true> : encode_blocks<false>;
  encode(memory.at<float>(kValues), memory.at<uint8_t>(kCodes), memory.at<float>(kAbsmax),
         static_cast<uint32_t>(count));
}

void decode_on_host(const Memory& memory, int64_t count, bool has_sign) {
  const auto decode = has_sign ? decode_blocks<true> : decode_blocks<false>;
  decode(memory.at<uint8_t>(kCodes), memory.at<float>(kAbsmax), memory.at<float>(kValues),
         static_cast<uint32_t>(count));
}

// Returns values over 12 decades. Every 700th value is not finite, and one block is zero.
std::vector<float> numbers(int64_t count, bool has_sign) {
  std::mt19937 random(4);
  std::vector<float> values = random_numbers<float>(count, has_sign ? -1 : 0, 1, random);
  std::uniform_int_distribution<int> decade(-12, 0);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] *= static_cast<float>(std::pow(10, decade(random)));
    if (i % 700 == 699) values[i] = i % 1400 == 699 ? INFINITY : NAN;
    if (i / kDynamicBlock == 1) values[i] = 0;
  }
  return values;
}

void run_round_trip(int64_t count, bool has_sign, Report& report) {
  const auto size = static_cast<std::size_t>(count);
  const Regions before{
      region_of(numbers(count, has_sign), sizeof(float)), region_of(std::vector<uint8_t>(size, 7), 1),
      region_of(std::vector<float>((size + kDynamicBlock - 1) / kDynamicBlock, 7), sizeof(float))};
  const Stream stream(0);
  const Memory device(before, Memory::Place::kDevice), host(before, Memory::Place::kHost);
  launch_encode(device.at<float>(kValues), device.at<uint8_t>(kCodes), device.at<float>(kAbsmax), count,
                has_sign, stream);
  encode_on_host(host, count, has_sign);
  stream.synchronize();
  report.expect(device.read() == host.read(), "the host's codes differ");
  launch_decode(device.at<float>(kValues), device.at<uint8_t>(kCodes), device.at<float>(kAbsmax), count,
                has_sign, stream);
  decode_on_host(host, count, has_sign);
  stream.synchronize();
  report.expect(device.read() == host.read(), "the host's numbers differ");
}

}  // namespace

void add_coded_cases(std::vector<Case>& cases) {
  for (const bool has_sign : {true, false})
    for (const int64_t count : {0, 1, 255, 256, 257, 2000, 2 * 16384 + 300})
      cases.push_back(
          {"codes of " + std::to_string(count) + (has_sign ? " numbers with" : " without") + " a sign",
           count <= 2000, [=](Report& report) { run_round_trip(count, has_sign, report); }});
}

}  // namespace harness
