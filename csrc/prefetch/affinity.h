// affinity.h: CPUs on the NUMA node of a GPU.
#pragma once

#include <string>

namespace flatout::prefetch {

// Binds the calling thread to the CPUs on the NUMA node of a PCI device, as far as the thread may use them.
// Threads that the calling thread starts later are bound, too. Pinned memory that the thread allocates later
// is on this node, too. No effect if the system does not know the node.
void bind_thread_near(const std::string& pci_bus_id) noexcept;

}  // namespace flatout::prefetch
