// kept_counters.h: chooses the counter of a call, either the kept counter of its stream or a counter in the
// call's memory.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "core/cuda_glue.h"
#include "scaling/counter.h"

namespace flatout {

// Numbers of the counters in the device's code. One counter per stream is enough, because kernels of a stream
// run one after another.
class KeptCounters {
 public:
  static KeptCounters& instance() {
    static KeptCounters counters;
    return counters;
  }

  // Calls launch(number), or launch(nullopt) if all counters are in use. Host threads take turns, so that
  // launches of one stream do not mix.
  template <class Launch>
  void use(int32_t device, cudaStream_t stream, const Launch& launch) {
    const std::lock_guard lock(mutex_);
    const bool has_room = next_ < kKeptCounters;
    const auto [entry, is_new] = numbers_.try_emplace({device, stream}, next_);
    if (is_new && !has_room) {
      numbers_.erase(entry);
      return launch(std::nullopt);
    }
    next_ += is_new ? 1 : 0;
    try {
      launch(std::optional(entry->second));
    } catch (...) {
      numbers_.erase(entry);  // the counter is possibly not 0
      throw;
    }
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int32_t, cudaStream_t>, uint32_t> numbers_;
  uint32_t next_ = 0;
};

// Sets the counter and calls launch(). `counter.own` is memory that only this call uses. A captured CUDA
// graph uses this memory, because a graph may be replayed on any stream, at the same time as other launches.
template <class Launch>
void with_counter(Counter& counter, const Tensor& leader, cudaStream_t stream, const Launch& launch) {
  const auto launch_with = [&](std::optional<uint32_t> kept) {
    if (kept.has_value()) {
      counter = {nullptr, *kept};
    } else {
      check_cuda(cudaMemsetAsync(counter.own, 0, sizeof(*counter.own), stream), "cudaMemsetAsync");
    }
    launch();
  };
  if (is_capturing(stream)) {
    launch_with(std::nullopt);
  } else {
    KeptCounters::instance().use(leader.get_device_index(), stream, launch_with);
  }
}

}  // namespace flatout
