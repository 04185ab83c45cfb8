// affinity.h: binds threads to the CPUs near a GPU.
#pragma once

#include <string>

namespace flatout::prefetch {

// Binds the calling thread, and threads that it starts later, to the CPUs on the NUMA node of a PCI device.
// CPUs that are not allowed for the thread stay excluded. Pinned memory that the thread allocates later is on
// the same node. Has no effect where the system does not know the node.
void bind_thread_near(const std::string& pci_bus_id) noexcept;

}  // namespace flatout::prefetch
