// intrinsics.h: operations that a GPU computes by an intrinsic, and the host by arithmetic.
#pragma once

#include <cuda_runtime_api.h>

#include "images/normalize_thread.h"

namespace harness {

enum class Operation {
  kHalfToFloat,
  kFloatToHalf,
  kFloatToBfloat,
  kFloatsToHalves,
  kFloatsToBfloats,
  kByteToFloat,
  kFunnel,
  kQuotient,
  kMultiplyAdd,
};

struct Operands {
  uint32_t a, b, c;
};

// Returns the result of an operation on words of 32 bits. Floats are passed as their bits. The first of two
// 16-bit results is the low half.
FLATOUT_HD uint32_t result_of(Operation operation, const Operands& x, const flatout::Divisor& divisor) {
  using flatout::detail::bit_cast;
  const float a = bit_cast<float>(x.a), b = bit_cast<float>(x.b), c = bit_cast<float>(x.c);
  flatout::f16 half[2]{};
  flatout::bf16 bfloat[2]{};
  switch (operation) {
    case Operation::kHalfToFloat:
      return bit_cast<uint32_t>(flatout::load(flatout::f16{static_cast<uint16_t>(x.a)}));
    case Operation::kFloatToHalf:
      flatout::store(half[0], a);
      return half[0].bits;
    case Operation::kFloatToBfloat:
      flatout::store(bfloat[0], a);
      return bfloat[0].bits;
    case Operation::kFloatsToHalves:
      flatout::store_pair(half, a, b);
      return half[0].bits | static_cast<uint32_t>(half[1].bits) << 16;
    case Operation::kFloatsToBfloats:
      flatout::store_pair(bfloat, a, b);
      return bfloat[0].bits | static_cast<uint32_t>(bfloat[1].bits) << 16;
    case Operation::kByteToFloat:
      return bit_cast<uint32_t>(flatout::Bytes<4>{x.a}.get(static_cast<int>(x.b)));
    case Operation::kFunnel:
      return flatout::funnel(x.a, x.b, x.c);
    case Operation::kQuotient:
      return divisor.quotient(x.a);
    case Operation::kMultiplyAdd:
      return bit_cast<uint32_t>(flatout::fused_multiply_add(a, b, c));
  }
  return 0;
}

void launch_intrinsics(Operation operation, const flatout::Divisor& divisor, const Operands* operands,
                       uint32_t* results, uint32_t count, cudaStream_t stream);

}  // namespace harness
