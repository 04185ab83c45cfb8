// memory.h: device and pinned memory of the emulated devices.
//
// Models "Device Memory", "Page-Locked Host Memory" and "Unified Virtual Address Space" of the CUDA C++
// Programming Guide. The host cannot access device memory, and a device cannot access memory of another
// device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace emulated {

enum class Kind { kDevice, kPinned, kRegistered };

struct Allocation {
  Kind kind;
  int device;
  std::uintptr_t begin;
  std::size_t bytes;
  // The whole mapping, and its pages that are not guard pages. Memory that the user has registered has no
  // mapping.
  char* mapping = nullptr;
  std::size_t mapped = 0;
  char* pages = nullptr;
  std::size_t page_bytes = 0;
};

constexpr unsigned kAllDevices = ~0u;

// Bit of a device in a set of devices.
constexpr unsigned bit_of(int device) { return 1u << device; }

// The memory of all devices. All functions but describe() require the runtime's lock.
class Memory {
 public:
  // Allocates memory between two guard pages, and fills the first 64 MiB with bytes of a NaN. The end of the
  // memory touches a guard page, as far as the alignment of 256 bytes allows.
  void* allocate(Kind kind, int device, std::size_t bytes);
  void release(void* begin);
  void add_registered(void* begin, std::size_t bytes);
  void remove_registered(void* begin);

  // Returns the allocation that holds an address, or null if there is none.
  const Allocation* find(const void* address) const;
  // Ends the process if an access that begins within an allocation leaves it.
  void check_access(const char* what, const void* begin, std::size_t bytes) const;
  std::size_t used(int device) const;

  // Lets a running operation access the memory of these devices. 0 means no device.
  void open(unsigned devices);

  // Writes the allocation of an address to stderr. Signal handlers call this function, so it takes no lock.
  void describe(const void* address) const;

 private:
  void protect(const Allocation& allocation) const;

  std::map<std::uintptr_t, Allocation> allocations_;
  unsigned open_ = 0;
};

}  // namespace emulated
