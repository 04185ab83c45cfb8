// memory.h: the initial memory of a case, and its copies on the host and on a device.
#pragma once

#include <cstddef>
#include <vector>

namespace harness {

// Bytes that begin `misalignment` bytes after a multiple of 64. An empty region has no address.
struct Region {
  std::vector<char> bytes;
  std::size_t misalignment = 0;
  bool operator==(const Region&) const = default;
};
using Regions = std::vector<Region>;

template <class T>
Region region_of(const std::vector<T>& values, std::size_t misalignment = 0) {
  const char* begin = reinterpret_cast<const char*>(values.data());
  return {{begin, begin + values.size() * sizeof(T)}, misalignment};
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
