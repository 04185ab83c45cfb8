// normalize_launch.h: the CUDA launcher of image normalization. Includes no torch header.
#pragma once

#include "core/cuda_launch.h"
#include "images/normalize_thread.h"

namespace flatout {

// Largest number of channels. Their constants are a kernel argument, and this many fit into the 4 KB that
// older drivers allow. The cameras with the most bands have about 220.
inline constexpr int kMaxChannels = 240;

// Launches the normalization of images to Ts. `channels` has one entry for each channel, kMaxChannels at
// most.
template <class T>
void launch_normalize(const ImageBatch& batch, const Channel* channels, cudaStream_t stream);

}  // namespace flatout
