// intrinsic_cases.cpp: compares operations on a device with operations on the host, and with NVIDIA's code
// for the host.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <random>

#include "cases.h"
#include "intrinsics.h"
#include "memory.h"
#include "stream.h"

namespace harness {

using flatout::Divisor;
using flatout::detail::bit_cast;

namespace {

constexpr uint32_t kLargest = (1u << 31) - 1;  // largest number that a Divisor accepts

uint32_t half_bits(__half value) { return __half_as_ushort(value); }
uint32_t bfloat_bits(__nv_bfloat16 value) { return __bfloat16_as_ushort(value); }

// Returns the result by definition. NVIDIA's headers define the conversions.
uint32_t definition(Operation operation, const Operands& x, uint32_t divisor) {
  const float a = bit_cast<float>(x.a), b = bit_cast<float>(x.b), c = bit_cast<float>(x.c);
  switch (operation) {
    case Operation::kHalfToFloat:
      return bit_cast<uint32_t>(__half2float(__ushort_as_half(static_cast<uint16_t>(x.a))));
    case Operation::kFloatToHalf:
      return half_bits(__float2half_rn(a));
    case Operation::kFloatToBfloat:
      return bfloat_bits(__float2bfloat16_rn(a));
    case Operation::kFloatsToHalves:
      return half_bits(__float2half_rn(a)) | half_bits(__float2half_rn(b)) << 16;
    case Operation::kFloatsToBfloats:
      return bfloat_bits(__float2bfloat16_rn(a)) | bfloat_bits(__float2bfloat16_rn(b)) << 16;
    case Operation::kByteToFloat:
      return bit_cast<uint32_t>(static_cast<float>(reinterpret_cast<const uint8_t*>(&x.a)[x.b]));
    case Operation::kFunnel:
      return static_cast<uint32_t>((static_cast<uint64_t>(x.b) << 32 | x.a) >> x.c);
    case Operation::kQuotient:
      return x.a / divisor;
    case Operation::kMultiplyAdd:
      return bit_cast<uint32_t>(std::fmaf(a, b, c));
  }
  return 0;
}

// Devices, NVIDIA's headers and flatout give NaN different bits, so all NaNs are equal here.
uint32_t without_payload(Operation operation, uint32_t result) {
  const auto narrow = [](uint32_t bits, uint32_t infinity) {
    return (bits & 0x7FFF) > infinity ? 0x7FFF : bits;
  };
  switch (operation) {
    case Operation::kHalfToFloat:
    case Operation::kMultiplyAdd:
      return std::isnan(bit_cast<float>(result)) ? 0x7FFFFFFF : result;
    case Operation::kFloatToHalf:
    case Operation::kFloatsToHalves:
      return narrow(result & 0xFFFF, 0x7C00) | narrow(result >> 16, 0x7C00) << 16;
    case Operation::kFloatToBfloat:
    case Operation::kFloatsToBfloats:
      return narrow(result & 0xFFFF, 0x7F80) | narrow(result >> 16, 0x7F80) << 16;
    default:
      return result;
  }
}

void run(Operation operation, const std::vector<Operands>& operands, uint32_t divisor, Report& report) {
  const auto count = static_cast<uint32_t>(operands.size());
  const Stream stream(0);
  const Memory device({region_of(operands), region_of(std::vector<uint32_t>(count))}, Memory::Place::kDevice);
  launch_intrinsics(operation, Divisor(divisor), device.at<Operands>(0), device.at<uint32_t>(1), count,
                    stream);
  stream.synchronize();
  const Regions after = device.read();
  const auto* results = elements<uint32_t>(after[1]);
  for (uint32_t i = 0; i < count; ++i) {
    const Operands& x = operands[i];
    const uint32_t expected = without_payload(operation, definition(operation, x, divisor));
    const uint32_t host = without_payload(operation, result_of(operation, x, Divisor(divisor)));
    if (without_payload(operation, results[i]) == expected && host == expected) continue;
    char text[128];
    std::snprintf(text, sizeof text, "%08x %08x %08x: device %08x, host %08x, by definition %08x", x.a, x.b,
                  x.c, results[i], host, expected);
    report.fail(text);
  }
}

// Returns floats with every upper half. Their lower halves are at and next to the ties of both 16-bit dtypes.
std::vector<Operands> floats() {
  std::vector<Operands> all;
  for (uint32_t upper = 0; upper < 1u << 16; ++upper)
    for (uint32_t eighth = 0; eighth < 8; ++eighth)
      for (const uint32_t rest : {0x0000u, 0x0001u, 0x0FFFu, 0x1000u, 0x1001u, 0x1FFFu})
        all.push_back({upper << 16 | eighth << 13 | rest, 0, 0});
  return all;
}

std::vector<Operands> halves() {
  std::vector<Operands> all;
  for (uint32_t bits = 0; bits < 1u << 16; ++bits) all.push_back({bits, 0, 0});
  return all;
}

std::vector<Operands> bytes() {
  std::vector<Operands> all;
  for (uint32_t byte = 0; byte < 256; ++byte)
    for (uint32_t place = 0; place < 4; ++place)
      for (const uint32_t others : {0x00000000u, 0xFFFFFFFFu, 0x12345678u})
        all.push_back({(others & ~(0xFFu << place * 8)) | byte << place * 8, place, 0});
  return all;
}

// Returns words with random bits in `mask`, and the bits of `set`.
std::vector<Operands> random_words(std::size_t count, uint32_t mask = ~0u, uint32_t set = 0) {
  std::mt19937 random(3);
  std::vector<Operands> all(count);
  const auto word = [&] { return (static_cast<uint32_t>(random()) & mask) | set; };
  for (Operands& x : all) x = {word(), word(), word()};
  return all;
}

std::vector<Operands> shifted_words() {
  std::vector<Operands> all = random_words(1000);
  for (Operands& x : all) x.c = x.c % 4 * 8;
  return all;
}

std::vector<Operands> pairs() { return random_words(200000); }
std::vector<Operands> floats_near_one() { return random_words(200000, 0x80FFFFFF, 0x3F000000); }

// Returns sizes of images, powers of two, and random divisors of every magnitude.
std::vector<uint32_t> divisors() {
  std::vector<uint32_t> all{3, 7, 224 * 224, kLargest};
  std::mt19937 random(5);
  for (uint32_t bits = 0; bits < 31; ++bits) {
    all.push_back(1u << bits);
    all.push_back(1u << bits | (static_cast<uint32_t>(random()) & ((1u << bits) - 1)));
  }
  return all;
}

// Returns random numbers below 2^31, and numbers at and next to multiples of the divisor.
std::vector<Operands> dividends(uint32_t divisor) {
  std::vector<Operands> all = random_words(100, kLargest);
  all.insert(all.end(),
             {{0, 0, 0}, {divisor - 1, 0, 0}, {kLargest, 0, 0}, {kLargest - kLargest % divisor, 0, 0}});
  for (uint32_t i = 0; i < 100; ++i) {
    const uint32_t multiple = all[i].a - all[i].a % divisor;
    all.push_back({multiple, 0, 0});
    all.push_back({multiple == 0 ? 0 : multiple - 1, 0, 0});
    if (multiple < kLargest) all.push_back({multiple + 1, 0, 0});
  }
  return all;
}

}  // namespace

void add_intrinsic_cases(std::vector<Case>& cases) {
  const auto add = [&](const char* name, bool is_small, Operation operation,
                       std::vector<Operands> (*operands)()) {
    cases.push_back({std::string("intrinsics ") + name, is_small,
                     [=](Report& report) { run(operation, operands(), 1, report); }});
  };
  add("half to float", true, Operation::kHalfToFloat, halves);
  add("float to half", false, Operation::kFloatToHalf, floats);
  add("float to bfloat16", false, Operation::kFloatToBfloat, floats);
  add("floats to halves", false, Operation::kFloatsToHalves, pairs);
  add("floats to bfloat16", false, Operation::kFloatsToBfloats, pairs);
  add("byte to float", true, Operation::kByteToFloat, bytes);
  add("funnel", true, Operation::kFunnel, shifted_words);
  cases.push_back({"intrinsics quotient", true, [](Report& report) {
                     for (const uint32_t divisor : divisors())
                       run(Operation::kQuotient, dividends(divisor), divisor, report);
                   }});
  add("multiply-add", false, Operation::kMultiplyAdd, floats_near_one);
}

}  // namespace harness
