// tensors.h: checks lists of tensors before anything is changed, and turns them into flat arrays.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/chunks.h"

namespace flatout {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

// True if the elements fill [data, data + numel) in some order, so that the tensor can be used as a flat
// array.
inline bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
  for (std::size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1) dims.emplace_back(strides[d], sizes[d]);
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

// True if the shapes are equal and every index has the same place in memory. Strides of dimensions of size 1
// do not count.
inline bool same_layout(const Tensor& a, const Tensor& b) {
  const auto sizes = a.sizes();
  const auto others = b.sizes();
  if (sizes.size() != others.size()) return false;
  for (std::size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != others[d]) return false;
  if (a.numel() == 0) return true;
  if (a.is_contiguous() && b.is_contiguous()) return true;
  for (int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  return true;
}

inline int32_t device_type(const Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type;
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  return device_type(a) == device_type(b) && a.get_device_index() == b.get_device_index();
}

// Returns an uninitialized tensor on the device of `leader`. torch::stable::new_empty would search its
// operator by name in each call.
inline Tensor new_tensor(const Tensor& leader, ScalarType dtype,
                         torch::headeronly::IntHeaderOnlyArrayRef sizes = {},
                         torch::headeronly::IntHeaderOnlyArrayRef strides = {}) {
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), code, device_type(leader),
                                                  leader.get_device_index(), &made));
  return Tensor(made);
}

// False if the storage of a dense tensor is smaller than `numel` elements, for example because FSDP has freed
// it.
inline bool has_memory(const Tensor& tensor, int64_t numel, std::size_t element_size) {
  if (numel == 0) return true;
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  return (tensor.storage_offset() + numel) * static_cast<int64_t>(element_size) <= bytes;
}

inline void check_memory(const Tensor& tensor, const char* name, std::size_t i) {
  STD_TORCH_CHECK(has_memory(tensor, tensor.numel(), tensor.element_size()), name, "[", i,
                  "] must have storage for ", tensor.numel(), " elements. Resize its storage back");
}

inline ScalarType check_dtype(const Tensor& tensor, const char* name) {
  const ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
                      dtype == ScalarType::BFloat16,
                  name, " must be float32, float64, float16 or bfloat16, got ",
                  torch::headeronly::toString(dtype));
  return dtype;
}

// Checks the first list of an operator. Its tensors must be dense, on one device and of one dtype.
inline void check_leader(const TensorList& list, const char* name) {
  STD_TORCH_CHECK(!list.empty(), name, " must hold at least one tensor");
  const ScalarType dtype = check_dtype(list[0], name);
  for (std::size_t i = 0; i < list.size(); ++i) {
    STD_TORCH_CHECK(list[i].scalar_type() == dtype, name, "[", i, "] must have the dtype of ", name, "[0]");
    STD_TORCH_CHECK(same_device(list[i], list[0]), name, "[", i, "] must be on the device of ", name, "[0]");
    STD_TORCH_CHECK(is_dense(list[i]), name, "[", i,
                    "] must be dense (contiguous in some order of its dimensions)");
    check_memory(list[i], name, i);
  }
}

// Checks that a companion has the device, shape and strides of the leader's tensor.
inline void check_beside(const Tensor& tensor, const char* name, std::size_t i, const Tensor& leader,
                         const char* leader_name) {
  STD_TORCH_CHECK(same_device(tensor, leader), name, "[", i, "] must be on the device of ", leader_name, "[",
                  i, "]");
  STD_TORCH_CHECK(same_layout(tensor, leader), name, "[", i, "] must have the shape and strides of ",
                  leader_name, "[", i, "]");
  check_memory(tensor, name, i);
}

struct NamedList {
  const TensorList& tensors;
  const char* name;
};

// Checks that no two tensors share memory. Kernels write many tensors at once, so shared memory would be
// written while it is read.
inline void check_apart(std::initializer_list<NamedList> lists) {
  struct Extent {
    uintptr_t begin, end;
    const char* name;
    std::size_t tensor;
  };
  std::vector<Extent> extents;
  for (const auto& [tensors, name] : lists) {
    extents.reserve(extents.size() + tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto begin = reinterpret_cast<uintptr_t>(tensors[i].data_ptr());
      if (tensors[i].numel() != 0)
        extents.push_back({begin, begin + tensors[i].numel() * tensors[i].element_size(), name, i});
    }
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < extents.size(); ++i)
    STD_TORCH_CHECK(extents[i - 1].end <= extents[i].begin, extents[i - 1].name, "[", extents[i - 1].tensor,
                    "] and ", extents[i].name, "[", extents[i].tensor, "] share memory");
}

// Checks that a tensor is one number on the device of `leader`. `is_dtype` is true if its dtype is one of
// `dtypes`, which the error names.
inline void check_number(const Tensor& tensor, bool is_dtype, const char* dtypes, const char* name,
                         const Tensor& leader) {
  STD_TORCH_CHECK(is_dtype && tensor.numel() == 1, name, " must be one ", dtypes, " number, got ",
                  tensor.numel(), " elements of ", torch::headeronly::toString(tensor.scalar_type()));
  STD_TORCH_CHECK(same_device(tensor, leader), name, " must be on the device of the parameters");
  check_memory(tensor, name, 0);
}

// Returns a number on the tensors' device, or `otherwise` if there is no tensor.
inline DeviceScalar device_scalar(const std::optional<Tensor>& tensor, const char* name, const Tensor& leader,
                                  double otherwise) {
  DeviceScalar scalar;
  scalar.value = otherwise;
  if (!tensor.has_value()) return scalar;
  const ScalarType dtype = tensor->scalar_type();
  check_number(*tensor, dtype == ScalarType::Float || dtype == ScalarType::Double, "float32 or float64", name,
               leader);
  scalar.address = tensor->const_data_ptr();
  scalar.is_double = dtype == ScalarType::Double;
  return scalar;
}

inline const float* device_flag(const std::optional<Tensor>& tensor, const char* name, const Tensor& leader) {
  if (!tensor.has_value()) return nullptr;
  STD_TORCH_CHECK(tensor->scalar_type() == ScalarType::Float, name, " must be float32");
  return static_cast<const float*>(device_scalar(tensor, name, leader, 0).address);
}

// Calls body with a null pointer of the C++ type of a dtype that check_dtype accepts.
template <class Body>
void with_dtype(ScalarType dtype, const Body& body) {
  switch (dtype) {
    case ScalarType::Float:
      return body(static_cast<float*>(nullptr));
    case ScalarType::Double:
      return body(static_cast<double*>(nullptr));
    case ScalarType::Half:
      return body(static_cast<f16*>(nullptr));
    default:
      return body(static_cast<bf16*>(nullptr));
  }
}

}  // namespace flatout
