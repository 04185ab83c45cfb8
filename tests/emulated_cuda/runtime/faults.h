// faults.h: errors on request, and the record of all calls and operations.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace emulated {

// Counts a call of the runtime, and returns the error that was requested for it; cudaSuccess if none was.
cudaError_t note_call(const std::string& name);
// Records an operation that a device has done.
void note_operation(unsigned stream, const std::string& name);

}  // namespace emulated

// For tests, by ctypes.
extern "C" {
// Lets the n-th call from now of a function of the runtime return an error. A sticky error stays, as after an
// illegal access: every later call of the process returns it.
void emulated_cuda_fail(const char* function, int nth, int error, int is_sticky);
// Lets `times` calls of a function fail, from the n-th call on. torch's allocator calls cudaMalloc twice
// before it raises an error.
void emulated_cuda_fail_repeatedly(const char* function, int nth, int times, int error);
// Ends all errors. Returns how many of the requested ones have not occurred.
int emulated_cuda_heal();
// Breaks the context: every later call returns the error, as after an assertion of a kernel.
void emulated_cuda_break(int error);
// Records the calls of this thread and the operations of all devices from now on, in an empty record.
void emulated_cuda_begin_record();
// Copies the record, a line each: "call FUNCTION" or "stream ID: OPERATION". Returns the bytes that it needs.
size_t emulated_cuda_record(char* text, size_t bytes);
}
