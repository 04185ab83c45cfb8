#include "faults.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "runtime.h"

namespace {

struct Fault {
  int calls_left;
  int times;
  cudaError_t error;
  bool is_sticky;
};

// Separate from the runtime's lock, because calls are recorded before they take that lock.
std::mutex& mutex = *new std::mutex;
auto& faults = *new std::map<std::string, Fault>;
auto& record = *new std::string;
std::thread::id recorded_thread;  // none before the first record

void add(const std::string& line) { record.append(line).append("\n"); }

}  // namespace

cudaError_t emulated::note_call(const std::string& name) {
  const std::lock_guard lock(mutex);
  if (std::this_thread::get_id() == recorded_thread) add("call " + name);
  const auto found = faults.find(name);
  if (found == faults.end() || --found->second.calls_left > 0) return cudaSuccess;
  const Fault fault = found->second;
  if (--found->second.times == 0) faults.erase(found);
  if (fault.is_sticky) Runtime::get().broken_context = fault.error;
  return fault.error;
}

void emulated::note_operation(unsigned stream, const std::string& name) {
  const std::lock_guard lock(mutex);
  if (recorded_thread != std::thread::id()) add("stream " + std::to_string(stream) + ": " + name);
}

void emulated_cuda_fail(const char* function, int nth, int times, int error, int is_sticky) {
  const std::lock_guard lock(mutex);
  faults[function] = {nth, times, static_cast<cudaError_t>(error), is_sticky != 0};
}

void emulated_cuda_break(int error) {
  emulated::Runtime::get().broken_context = static_cast<cudaError_t>(error);
}

int emulated_cuda_heal() {
  const std::lock_guard lock(mutex);
  const auto left = static_cast<int>(faults.size());
  faults.clear();
  emulated::Runtime::get().broken_context = cudaSuccess;
  return left;
}

void emulated_cuda_begin_record() {
  const std::lock_guard lock(mutex);
  recorded_thread = std::this_thread::get_id();
  record.clear();
}

size_t emulated_cuda_record(char* text, size_t bytes) {
  const std::lock_guard lock(mutex);
  if (text != nullptr) std::memcpy(text, record.data(), std::min(bytes, record.size()));
  return record.size();
}
