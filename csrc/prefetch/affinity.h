// affinity.h: the CPUs beside a GPU.
#pragma once

#include <string>

namespace flatout::prefetch {

// Keeps the calling thread, and threads that it starts, on those of its CPUs that are on the NUMA node of a
// PCI device. Pinned memory that the thread then allocates is on this node, too. No effect where the system
// does not know the node.
void bind_thread_near(const std::string& pci_bus_id) noexcept;

}  // namespace flatout::prefetch
