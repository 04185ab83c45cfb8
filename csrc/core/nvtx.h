// nvtx.h: named ranges for profilers. A build without CUDA has no ranges.
#pragma once

#if defined(FLATOUT_WITH_CUDA) && __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define FLATOUT_HAS_NVTX 1
#else
#define FLATOUT_HAS_NVTX 0
#endif

namespace flatout::nvtx {

inline void push([[maybe_unused]] const char* name) {
#if FLATOUT_HAS_NVTX
  static_cast<void>(nvtxRangePushA(name));
#endif
}

inline void pop() {
#if FLATOUT_HAS_NVTX
  static_cast<void>(nvtxRangePop());
#endif
}

// True if a tool is attached. The result stays the same until the process ends.
inline bool listens() {
#if FLATOUT_HAS_NVTX
  const bool tracked = nvtxRangePushA("flatout") != NVTX_NO_PUSH_POP_TRACKING;
  if (tracked) pop();
  return tracked;
#else
  return false;
#endif
}

class Range {
 public:
  explicit Range(const char* name) { push(name); }
  ~Range() { pop(); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace flatout::nvtx
