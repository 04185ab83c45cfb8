// cpu.h: runs a loop over the chunks of many tensors on all cores, compiled for the widest vectors of this
// CPU.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "core/chunks.h"

namespace flatout {

// Explicit functions replace target_clones, because they work with templates, need no ifunc, and give the
// code of each ISA its own name. All functions that `body` calls are always_inline, so that no code compiled
// for AVX gets into functions shared with other files.
#if defined(__x86_64__) && defined(__GNUC__)
template <class Body>
[[gnu::target("arch=x86-64-v4,prefer-vector-width=512"), gnu::noinline]] void run_v4(const Body& body) {
  body();
}
template <class Body>
[[gnu::target("arch=x86-64-v3"), gnu::noinline]] void run_v3(const Body& body) {
  body();
}
#endif
template <class Body>
[[gnu::noinline]] void run_baseline(const Body& body) {
  body();
}

// True on CPUs where prefetches make a loop faster. Intel's hardware prefetchers stop at the end of a page.
// With prefetches, one thread of a Xeon reads nearly twice as fast. AMD's hardware prefetchers cross pages.
// With prefetches, an EPYC loses a tenth of its speed.
inline const bool prefetches_pay = []() noexcept {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  return __builtin_cpu_is("intel") != 0;
#else
  return true;
#endif
}();

// Prefetches `bytes` of memory at `address + ahead`, if `prefetches_pay`. Any address is valid.
FLATOUT_HD void prefetch_ahead(const void* address, std::size_t bytes, std::size_t ahead) {
  if (!prefetches_pay) return;
  const char* begin = static_cast<const char*>(address) + ahead;
  for (std::size_t line = 0; line < bytes; line += 64) __builtin_prefetch(begin + line);
}

enum class Isa { kBaseline, kV3, kV4 };

inline Isa detect_isa() {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  // Checks single features, because compilers before GCC 12 do not know the levels by name.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi") ||
      !__builtin_cpu_supports("bmi2"))
    return Isa::kBaseline;
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512vl")
             ? Isa::kV4
             : Isa::kV3;
#endif
  return Isa::kBaseline;
}

template <class Body>
void run_vectorized(const Body& body) {
  static const Isa isa = detect_isa();
  switch (isa) {
#if defined(__x86_64__) && defined(__GNUC__)
    case Isa::kV4:
      return run_v4(body);
    case Isa::kV3:
      return run_v3(body);
#endif
    default:
      return run_baseline(body);
  }
}

// Order of the chunks. A second pass that runs backwards begins with the chunks that the first pass read
// last. Caches still hold these chunks.
enum class Direction { kForwards, kBackwards };

// Calls body(tensor, begin, count, chunk) for every chunk, in one parallel region for all tensors. Each
// thread claims a few chunks at a time. So no thread waits for another that has larger tensors or a busy
// core.
template <class Body>
void for_each_chunk(const std::vector<FlatTensor>& list, const std::vector<uint32_t>& first, const Body& body,
                    Direction direction = Direction::kForwards) {
  constexpr int64_t kWorthAThread =
      2 * int64_t{kChunk};  // elements; for fewer, the wake-up of a thread costs more than it saves
  const uint32_t chunks = first.back();
  int64_t elements = 0;
  for (const FlatTensor& tensor : list) elements += tensor.numel;
  const int64_t threads = std::clamp<int64_t>(elements / kWorthAThread, 1, torch::stable::get_num_threads());
  const uint32_t batch = std::clamp<uint32_t>(chunks / (16 * static_cast<uint32_t>(threads)), 1, 64);
  std::atomic<uint32_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    for (uint32_t begin; (begin = next.fetch_add(batch, std::memory_order_relaxed)) < chunks;) {
      for (uint32_t i = begin; i < std::min(begin + batch, chunks); ++i) {
        const uint32_t chunk = direction == Direction::kForwards ? i : chunks - 1 - i;
        const uint32_t tensor = tensor_of(first.data(), static_cast<uint32_t>(list.size()), chunk);
        const int64_t offset = static_cast<int64_t>(chunk - first[tensor]) * kChunk;
        body(tensor, offset, static_cast<uint32_t>(std::min<int64_t>(kChunk, list[tensor].numel - offset)),
             chunk);
      }
    }
  };
  if (threads == 1) return work(0, 1);
  torch::stable::parallel_for(0, threads, 1, work);
}

}  // namespace flatout
