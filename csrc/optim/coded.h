// coded.h: numbers and their 8-bit codes, as arguments of the operators that convert them.
#pragma once

#include "core/tensors.h"
#include "optim/dynamic8.h"

namespace flatout {

// Checks the absmaxes of an 8-bit tensor with the shape of `leader`.
inline void check_absmax(const Tensor& absmax, const char* name, std::size_t i, const Tensor& leader,
                         const char* leader_name) {
  const int64_t blocks = (leader.numel() + kDynamicBlock - 1) / kDynamicBlock;
  STD_TORCH_CHECK(absmax.scalar_type() == ScalarType::Float && absmax.is_contiguous() &&
                      absmax.numel() == blocks && same_device(absmax, leader),
                  name, "[", i, "] must be ", blocks, " contiguous float32 numbers on the device of ",
                  leader_name, "[", i, "]");
  check_memory(absmax, name, i);
}

struct Coded {
  float* values;
  uint8_t* codes;
  float* absmax;  // one per kDynamicBlock numbers
  int64_t numel;
};

inline Coded check_coded(const Tensor& values, const Tensor& codes, const Tensor& absmax) {
  check_leader({values}, "values");
  check_beside(codes, "codes", 0, values, "values");
  STD_TORCH_CHECK(values.scalar_type() == ScalarType::Float && codes.scalar_type() == ScalarType::Byte,
                  "values must be float32 and codes uint8, got ",
                  torch::headeronly::toString(values.scalar_type()), " and ",
                  torch::headeronly::toString(codes.scalar_type()));
  check_absmax(absmax, "absmax", 0, values, "values");
  const TensorList value_list{values}, code_list{codes}, absmax_list{absmax};
  check_apart({{value_list, "values"}, {code_list, "codes"}, {absmax_list, "absmax"}});
  return {static_cast<float*>(values.data_ptr()), static_cast<uint8_t*>(codes.data_ptr()),
          static_cast<float*>(absmax.data_ptr()), values.numel()};
}

}  // namespace flatout
