// dlpack.h: the structs of DLPack's C ABI: the "dltensor" capsule (version 0.x), which torch.from_dlpack
// takes, and the functions of torch.Tensor.__dlpack_c_exchange_api__ (version 1.3, torch >= 2.11).
#pragma once

#include <cstdint>

namespace flatout::dlpack {

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

struct ExchangeApi {
  std::uint32_t version[2];  // major, minor
  ExchangeApi* older;
  void* unused[3];
  int (*view)(void* py_object, Tensor* out);  // borrows; on failure, sets Python's error and returns -1
};

}  // namespace flatout::dlpack
