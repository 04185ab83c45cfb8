// faults.h: errors on request, and the record of all calls and operations.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace emulated {

// Counts a call of the runtime, and returns the error that was requested for this call, else cudaSuccess.
cudaError_t note_call(const std::string& name);
// Records an operation that a device has done.
void note_operation(unsigned stream, const std::string& name);

}  // namespace emulated

// Tests call these functions by ctypes.
extern "C" {
// Makes calls of a function of the runtime return an error, from the n-th call from now on, `times` calls in
// all. A sticky error stays, as after an illegal access. Every later call of the process then returns this
// error.
void emulated_cuda_fail(const char* function, int nth, int times, int error, int is_sticky);
// Ends all errors. Returns the number of requested errors that have not occurred as often as requested.
int emulated_cuda_heal();
// Breaks the context. Every later call returns the error, as after an assertion of a kernel.
void emulated_cuda_break(int error);
// Clears the record, and then records the calls of this thread and the operations of all devices.
void emulated_cuda_begin_record();
// Copies the record. Each line is "call FUNCTION" or "stream ID: OPERATION". Returns the size of the record
// in bytes.
size_t emulated_cuda_record(char* text, size_t bytes);
}
