// memory.cpp: allocates and copies the memory of a case. The host accesses device memory only by
// cudaMemcpy.
#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "core/cuda_launch.h"

namespace harness {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kMostAllocations = 200;  // each costs system calls in every operation of a device
constexpr char kBetween = '\xFF';              // a NaN in every floating-point type

std::size_t round_up(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Memory::Memory(const Regions& regions, Place place)
    : place_(place), regions_(regions), address_(regions.size()) {
  const auto filled =
      std::count_if(regions.begin(), regions.end(), [](const Region& r) { return !r.bytes.empty(); });
  const bool together = place == Place::kHost || static_cast<std::size_t>(filled) > kMostAllocations;
  std::vector<std::vector<char>> images;
  std::vector<std::pair<std::size_t, std::size_t>> places(regions.size());  // image, offset
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const Region& region = regions[i];
    if (region.bytes.empty()) continue;
    if (images.empty() || !together) images.emplace_back();
    std::vector<char>& image = images.back();
    const std::size_t offset = round_up(image.size()) + region.misalignment;
    image.resize(offset, kBetween);
    image.insert(image.end(), region.bytes.begin(), region.bytes.end());
    places[i] = {images.size() - 1, offset};
  }
  for (const std::vector<char>& image : images) {
    void* begin = nullptr;
    if (place == Place::kHost) {
      begin = std::aligned_alloc(kAlignment, round_up(image.size()));
      std::memcpy(begin, image.data(), image.size());
    } else {
      flatout::check_cuda(cudaMalloc(&begin, image.size()), "cudaMalloc");
      flatout::check_cuda(cudaMemcpy(begin, image.data(), image.size(), cudaMemcpyHostToDevice),
                          "cudaMemcpy");
    }
    allocations_.push_back({static_cast<char*>(begin), image.size()});
  }
  for (std::size_t i = 0; i < regions.size(); ++i)
    if (!regions[i].bytes.empty()) address_[i] = allocations_[places[i].first].begin + places[i].second;
}

Memory::~Memory() {
  for (const Allocation& allocation : allocations_)
    place_ == Place::kHost ? std::free(allocation.begin) : static_cast<void>(cudaFree(allocation.begin));
}

Regions Memory::read() const {
  Regions regions = regions_;
  std::size_t i = 0;
  for (const Allocation& allocation : allocations_) {
    std::vector<char> image(allocation.bytes);
    if (place_ == Place::kHost) {
      std::memcpy(image.data(), allocation.begin, image.size());
    } else {
      flatout::check_cuda(cudaMemcpy(image.data(), allocation.begin, image.size(), cudaMemcpyDeviceToHost),
                          "cudaMemcpy");
    }
    std::size_t end = 0;  // of the last region
    for (; i < regions.size(); ++i) {
      std::vector<char>& bytes = regions[i].bytes;
      if (bytes.empty()) continue;
      const auto* address = static_cast<const char*>(address_[i]);
      if (address < allocation.begin || address >= allocation.begin + allocation.bytes) break;
      const auto begin = static_cast<std::size_t>(address - allocation.begin);
      if (std::any_of(image.data() + end, image.data() + begin, [](char byte) { return byte != kBetween; }))
        throw std::runtime_error("bytes before region " + std::to_string(i) + " have changed");
      std::memcpy(bytes.data(), image.data() + begin, bytes.size());
      end = begin + bytes.size();
    }
  }
  return regions;
}

}  // namespace harness
