// dynamic8_launch.h: the CUDA launchers of conversions to 8-bit codes and back. Includes no torch header.
#pragma once

#include "core/cuda_launch.h"

namespace flatout {

void launch_encode(const float* values, uint8_t* codes, float* absmax, int64_t count, bool has_sign,
                   cudaStream_t stream);
void launch_decode(float* values, const uint8_t* codes, const float* absmax, int64_t count, bool has_sign,
                   cudaStream_t stream);

}  // namespace flatout
