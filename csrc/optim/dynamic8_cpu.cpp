// dynamic8_cpu.cpp: whole tensors into 8 bits and back, where an optimizer's state is converted.
#include <torch/csrc/stable/library.h>

#include "core/cpu.h"
#include "core/dynamic8.h"
#include "core/tensors.h"

namespace flatout {
namespace {

struct EncodeChunk {
  const float* values;
  uint8_t* codes;
  float* absmax;
  uint32_t count;
  bool has_sign;

  [[gnu::always_inline]] void operator()() const {
    has_sign ? encode_blocks<true>(values, codes, absmax, count)
             : encode_blocks<false>(values, codes, absmax, count);
  }
};

struct DecodeChunk {
  float* values;
  const uint8_t* codes;
  const float* absmax;
  uint32_t count;
  bool has_sign;

  [[gnu::always_inline]] void operator()() const {
    has_sign ? decode_blocks<true>(codes, absmax, values, count)
             : decode_blocks<false>(codes, absmax, values, count);
  }
};

// Calls run_vectorised with the chunks of a pair of tensors.
template <class Chunk>
void convert(const Tensor& values, const Tensor& codes, const Tensor& absmax, bool has_sign) {
  check_leader({values}, "values");
  check_beside(codes, "codes", 0, values, "values");
  STD_TORCH_CHECK(values.scalar_type() == ScalarType::Float && codes.scalar_type() == ScalarType::Byte,
                  "values must be float32 and codes uint8, got ",
                  torch::headeronly::toString(values.scalar_type()), " and ",
                  torch::headeronly::toString(codes.scalar_type()));
  check_absmax(absmax, "absmax", 0, values, "values");
  const TensorList value_list{values}, code_list{codes}, absmax_list{absmax};
  check_apart({{value_list, "values"}, {code_list, "codes"}, {absmax_list, "absmax"}});
  FlatTensor flat{};
  flat.numel = values.numel();
  const std::vector<FlatTensor> list{flat};
  auto* value = static_cast<float*>(values.data_ptr());
  auto* code = static_cast<uint8_t*>(codes.data_ptr());
  auto* largest = static_cast<float*>(absmax.data_ptr());
  for_each_chunk(list, first_chunks(list), [&](uint32_t, int64_t begin, uint32_t count, uint32_t) {
    run_vectorised(Chunk{value + begin, code + begin, largest + begin / kDynamicBlock, count, has_sign});
  });
}

void encode_(const Tensor& values, const Tensor& codes, const Tensor& absmax, bool has_sign) {
  convert<EncodeChunk>(values, codes, absmax, has_sign);
}
void decode_(const Tensor& values, const Tensor& codes, const Tensor& absmax, bool has_sign) {
  convert<DecodeChunk>(values, codes, absmax, has_sign);
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CPU, m) {
  m.impl("encode_", TORCH_BOX(&flatout::encode_));
  m.impl("decode_", TORCH_BOX(&flatout::decode_));
}
