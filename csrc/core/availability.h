// availability.h: check of the kernels on a device.
#pragma once

namespace flatout {

// True if the current device runs the kernels. The driver must be new enough, and the kernels must have code
// for the device.
bool kernels_run();

}  // namespace flatout
