#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// Functions of AddressSanitizer, which are null in a process without AddressSanitizer.
extern "C" {
[[gnu::weak]] void __asan_poison_memory_region(const volatile void* begin, std::size_t bytes);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void* begin, std::size_t bytes);
}

namespace emulated {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2}
                                  << 20;  // 512 small pages take as long to protect as 512 of these
constexpr std::size_t kAlignment = 256;  // "Device Memory Accesses": of every address that cudaMalloc returns
constexpr int kPoison = 0xFF;            // a NaN in every floating-point type
constexpr std::size_t kMostPoisoned = std::size_t{64} << 20;  // more would cost seconds and real memory

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

[[noreturn]] void end_process(const char* what, const void* address, std::size_t bytes) {
  std::fprintf(stderr, "emulated CUDA: %s: %p, %zu bytes\n", what, address, bytes);
  std::abort();
}

}  // namespace

void* Memory::allocate(Kind kind, int device, std::size_t bytes) {
  const std::size_t needed = round_up(std::max<std::size_t>(bytes, 1), kAlignment);
  const std::size_t unit = needed < kHugePage ? kPage : kHugePage;
  const std::size_t page_bytes = round_up(needed, unit), mapped = page_bytes + kPage + unit;
  void* mapping = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  auto* pages = reinterpret_cast<char*>(round_up(reinterpret_cast<std::uintptr_t>(mapping) + 1, unit));
  mprotect(pages, page_bytes, PROT_READ | PROT_WRITE);
  if (unit == kHugePage) madvise(pages, page_bytes, MADV_HUGEPAGE);
  char* begin = pages + page_bytes - needed;
  std::memset(begin, kPoison, std::min(needed, kMostPoisoned));
  if (__asan_poison_memory_region != nullptr) __asan_poison_memory_region(begin + bytes, needed - bytes);
  const auto key = reinterpret_cast<std::uintptr_t>(begin);
  const Allocation made{kind, device, key, bytes, static_cast<char*>(mapping), mapped, pages, page_bytes};
  allocations_[key] = made;
  protect(made);
  return begin;
}

void Memory::release(void* begin) {
  const auto found = allocations_.find(reinterpret_cast<std::uintptr_t>(begin));
  if (found == allocations_.end() || found->second.mapping == nullptr)
    end_process("free of an unknown address", begin, 0);
  const Allocation old = found->second;
  allocations_.erase(found);
  if (__asan_unpoison_memory_region != nullptr) __asan_unpoison_memory_region(old.mapping, old.mapped);
  munmap(old.mapping, old.mapped);
}

void Memory::add_registered(void* begin, std::size_t bytes) {
  const auto key = reinterpret_cast<std::uintptr_t>(begin);
  allocations_[key] = {Kind::kRegistered, 0, key, bytes};
}

void Memory::remove_registered(void* begin) { allocations_.erase(reinterpret_cast<std::uintptr_t>(begin)); }

const Allocation* Memory::find(const void* address) const {
  const auto key = reinterpret_cast<std::uintptr_t>(address);
  auto next = allocations_.upper_bound(key);
  if (next == allocations_.begin()) return nullptr;
  const Allocation& allocation = std::prev(next)->second;
  return key < allocation.begin + std::max<std::size_t>(allocation.bytes, 1) ? &allocation : nullptr;
}

void Memory::check_access(const char* what, const void* begin, std::size_t bytes) const {
  const Allocation* allocation = find(begin);
  if (allocation == nullptr) return;
  const std::size_t left = allocation->begin + allocation->bytes - reinterpret_cast<std::uintptr_t>(begin);
  if (bytes > left) end_process(what, begin, bytes);
}

std::size_t Memory::used(int device) const {
  std::size_t bytes = 0;
  for (const auto& [begin, allocation] : allocations_)
    if (allocation.kind == Kind::kDevice && allocation.device == device) bytes += allocation.bytes;
  return bytes;
}

void Memory::open(unsigned devices) {
  const unsigned before = open_;
  open_ = devices;
  for (const auto& [begin, allocation] : allocations_)
    if (allocation.kind == Kind::kDevice && ((before ^ devices) & bit_of(allocation.device)) != 0)
      protect(allocation);
}

void Memory::protect(const Allocation& allocation) const {
  if (allocation.kind != Kind::kDevice) return;
  const bool may = (open_ & bit_of(allocation.device)) != 0;
  mprotect(allocation.pages, allocation.page_bytes, may ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void Memory::describe(const void* address) const {
  const auto* at = static_cast<const char*>(address);
  for (const auto& [begin, allocation] : allocations_) {
    if (at < allocation.mapping || at >= allocation.mapping + allocation.mapped) continue;
    const char* kind = allocation.kind == Kind::kDevice ? "device" : "pinned";
    std::fprintf(stderr, "emulated CUDA: %p is at offset %td of %zu bytes of %s memory (device %d)\n",
                 address, at - reinterpret_cast<const char*>(begin), allocation.bytes, kind,
                 allocation.device);
    return;
  }
  std::fprintf(stderr, "emulated CUDA: %p is in no allocation: freed, or never allocated\n", address);
}

}  // namespace emulated
