// memory.h: the initial memory of a case, and its copies on the host and on a device.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <vector>

#include "numbers.h"
#include "scaling/norm.h"

namespace harness {

// True if all elements have the same bits. Devices and hosts give NaN different bits, so all NaNs are equal.
template <class T>
bool same_elements(const std::vector<char>& left, const std::vector<char>& right) {
  if constexpr (std::is_same_v<T, flatout::Partial>) {
    return same_elements<double>(left, right);  // a partial is two of them
  } else if constexpr (!Number<T>) {
    return left == right;
  } else {
    if (left.size() != right.size()) return false;
    for (std::size_t at = 0; at < left.size(); at += sizeof(T)) {
      if (std::memcmp(&left[at], &right[at], sizeof(T)) == 0) continue;
      T one, other;
      std::memcpy(&one, &left[at], sizeof(T));
      std::memcpy(&other, &right[at], sizeof(T));
      if (!std::isnan(number_of(one)) || !std::isnan(number_of(other))) return false;
    }
    return true;
  }
}

// Bytes that begin `misalignment` bytes after a multiple of 64. An empty region has no address.
struct Region {
  std::vector<char> bytes;
  std::size_t misalignment = 0;
  bool (*same)(const std::vector<char>&, const std::vector<char>&) = same_elements<char>;
  bool operator==(const Region& other) const { return same(bytes, other.bytes); }
};
using Regions = std::vector<Region>;

template <class T>
Region region_of(const std::vector<T>& values, std::size_t misalignment = 0) {
  const char* begin = reinterpret_cast<const char*>(values.data());
  return {{begin, begin + values.size() * sizeof(T)}, misalignment, same_elements<T>};
}
template <class T>
const T* elements(const Region& region) {
  return reinterpret_cast<const T*>(region.bytes.data());
}

// A copy of regions. On a device, each of up to 200 regions is a separate allocation. More regions share one
// allocation, as on the host.
class Memory {
 public:
  enum class Place { kHost, kDevice };
  Memory(const Regions& regions, Place place);
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  template <class T = void>
  T* at(std::size_t region) const {
    return static_cast<T*>(address_[region]);
  }
  // Returns the regions as they are now. Throws if the bytes between regions have changed.
  Regions read() const;

 private:
  struct Allocation {
    char* begin;
    std::size_t bytes;
  };
  Place place_;
  Regions regions_;  // as they were at first
  std::vector<Allocation> allocations_;
  std::vector<void*> address_;
};

}  // namespace harness
