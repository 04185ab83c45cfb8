// dlpack.h: the structs of DLPack's C ABI (version 0.x, the "dltensor" capsule), which torch.from_dlpack
// takes.
#pragma once

#include <cstdint>

namespace flatout::prefetch::dlpack {

inline constexpr std::int32_t cpu =
    1;  // kDLCPU; pinned memory is exported as plain host memory, like torch's

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;  // 0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // null: contiguous
  std::uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void* owner;
  void (*deleter)(ManagedTensor*);
};

}  // namespace flatout::prefetch::dlpack
