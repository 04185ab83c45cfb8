// affinity.cpp: CPUs on the NUMA node of a GPU, as Linux lists them.
#include "prefetch/affinity.h"

#ifdef __linux__
#include <sched.h>

#include <exception>
#include <fstream>

namespace flatout::prefetch {
namespace {

// Reads a list such as "0-3,8,12-15".
cpu_set_t read_cpus(std::istream& list) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (int first = 0; list >> first;) {
    int last = first;
    if (list.peek() == '-') list.ignore() >> last;
    for (int cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &cpus);
    if (list.peek() == ',') list.ignore();
  }
  return cpus;
}

}  // namespace

void bind_thread_near(const std::string& pci_bus_id) noexcept try {
  std::ifstream list("/sys/bus/pci/devices/" + pci_bus_id + "/local_cpulist");
  cpu_set_t cpus = read_cpus(list), allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  CPU_AND(&cpus, &cpus, &allowed);  // the user may have excluded CPUs
  if (CPU_COUNT(&cpus) != 0) sched_setaffinity(0, sizeof cpus, &cpus);
} catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  // The thread keeps its affinity.
}

}  // namespace flatout::prefetch
#else
void flatout::prefetch::bind_thread_near(const std::string&) noexcept {}
#endif
