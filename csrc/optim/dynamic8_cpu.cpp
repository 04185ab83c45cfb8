// dynamic8_cpu.cpp: conversion of whole tensors into 8 bits and back on the CPU, for optimizer state.
#include <torch/csrc/stable/library.h>

#include "core/cpu.h"
#include "optim/coded.h"

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

// Calls run_vectorized with the chunks of a pair of tensors.
template <class Chunk>
void convert(const Coded& coded, bool has_sign) {
  FlatTensor flat{};
  flat.numel = coded.numel;
  const std::vector<FlatTensor> list{flat};
  for_each_chunk(list, first_chunks(list), [&](uint32_t, int64_t begin, uint32_t count, uint32_t) {
    run_vectorized(Chunk{coded.values + begin, coded.codes + begin, coded.absmax + begin / kDynamicBlock,
                         count, has_sign});
  });
}

void encode_(const Tensor& values, const Tensor& codes, const Tensor& absmax, bool has_sign) {
  convert<EncodeChunk>(check_coded(values, codes, absmax), has_sign);
}
void decode_(const Tensor& values, const Tensor& codes, const Tensor& absmax, bool has_sign) {
  convert<DecodeChunk>(check_coded(values, codes, absmax), has_sign);
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CPU, m) {
  m.impl("encode_", TORCH_BOX(&flatout::encode_));
  m.impl("decode_", TORCH_BOX(&flatout::decode_));
}
