// stream.h: creates a stream of a device, and makes the device current.
#pragma once

#include "core/cuda_launch.h"

namespace harness {

// Returns the second device, or the only device.
inline int last_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 1 ? 1 : 0;
}

class Stream {
 public:
  explicit Stream(int device) {
    flatout::check_cuda(cudaSetDevice(device), "cudaSetDevice");
    flatout::check_cuda(cudaStreamCreate(&stream_), "cudaStreamCreate");
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }

  operator cudaStream_t() const { return stream_; }
  void synchronize() const { flatout::check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace harness
