// availability.h: tells whether the kernels run on a device.
#pragma once

namespace flatout {

// True if the current device runs the kernels: the driver is new enough, and they have code for the device.
bool kernels_run();

}  // namespace flatout
