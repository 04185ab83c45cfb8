// step_variant.cu: times Adam steps of one tensor on a GPU, and prints the milliseconds of each storage as
// JSON. benchmarks/step_variants.py compiles it with copies of csrc that have other constants.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "optim/step_kernel.cuh"

namespace flatout {
namespace {

constexpr int kRounds = 21;

template <class Run>
double median_ms(const Run& run) {
  cudaEvent_t begin, end;
  check_cuda(cudaEventCreate(&begin), "cudaEventCreate");
  check_cuda(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> times(kRounds);
  for (float& time : times) {
    check_cuda(cudaEventRecord(begin), "cudaEventRecord");
    run();
    check_cuda(cudaEventRecord(end), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end), "cudaEventSynchronize");
    check_cuda(cudaEventElapsedTime(&time, begin, end), "cudaEventElapsedTime");
  }
  std::sort(times.begin(), times.end());
  return times[kRounds / 2];
}

char* filled(int64_t bytes) {
  char* memory = nullptr;
  check_cuda(cudaMalloc(&memory, bytes), "cudaMalloc");
  check_cuda(cudaMemset(memory, 0x3c, bytes), "cudaMemset");  // 0.0115 in all types
  return memory;
}

template <class T>
void print_step(const char* name, int64_t elements, const Storage& storage) {
  using Rule = AdamRule<compute_t<T>, false>;
  FlatTensor tensor{};
  tensor.numel = elements;
  int64_t bytes = 0;  // per element
  const auto add = [&](int stream, int passes) {
    const auto size = static_cast<int64_t>(storage.is_wide(stream) ? sizeof(compute_t<T>) : sizeof(T));
    tensor.address[stream] = filled(elements * size);
    bytes += passes * size;
  };
  for (const int stream : {0, 2, 3}) add(stream, 2);
  add(1, 1);
  if (storage.low != Low::kNone) add(5, 2);
  const std::vector<FlatTensor> tensors{tensor};
  const std::vector<char> image = table_image(tensors);
  char* table = filled(static_cast<int64_t>(image.size()));
  check_cuda(cudaMemcpy(table, image.data(), image.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  StepConfig common;
  common.group[0].lr.value = 1e-3;
  common.grad_factor.value = 1;
  const double options[] = {0.9, 0.999, 1e-8, 1};
  const AdamConfig config(common, options);
  const double ms = median_ms([&] {
    with_kind<T, Rule>(storage, false, [&](auto kind) {
      constexpr Kind K = decltype(kind)::value;
      if constexpr (!kHasCodes<K> && K != Kind::kRandom)  // others would double the time to compile
        launch_batches<T, Rule, K>(config, storage, tensors, table_at(table, 1), nullptr);
    });
  });
  std::printf("\"%s\": {\"ms\": %.4f, \"GB/s\": %.1f}, ", name, ms, bytes * elements / ms / 1e6);
  for (void* address : tensor.address) check_cuda(cudaFree(address), "cudaFree");
  check_cuda(cudaFree(table), "cudaFree");
}

void print_copy(int64_t bytes) {
  char *from = filled(bytes), *to = filled(bytes);
  const double ms = median_ms(
      [&] { check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice), "cudaMemcpyAsync"); });
  std::printf("\"copy\": {\"ms\": %.4f, \"GB/s\": %.1f}}\n", ms, 2 * bytes / ms / 1e6);
  check_cuda(cudaFree(from), "cudaFree");
  check_cuda(cudaFree(to), "cudaFree");
}

}  // namespace
}  // namespace flatout

// Argument: the number of elements.
int main(int, char** arguments) {
  using namespace flatout;
  const int64_t elements = std::atoll(arguments[1]);
  constexpr uint32_t kAll = 0b1111, kStates = 0b1100;
  std::printf("{");
  print_step<float>("float32", elements, {kAll, false, Low::kNone, false});
  print_step<bf16>("bfloat16", elements, {0, false, Low::kNone, false});
  print_step<bf16>("bfloat16, float32 moments", elements, {kStates, false, Low::kNone, false});
  print_step<bf16>("bfloat16, remainder", elements, {kStates, false, Low::kRemainder, false});
  print_copy(4 * elements);
}
