// aten.cpp: replaces torch's CUDA kernels by torch's CPU kernels, on the same memory. Each kernel is an
// operation of a stream, so it runs as late as on a GPU, and can be captured.
//
// This file uses torch's C++ API, which is not stable, so the file works with one version of torch.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/Copy.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdio>
#include <functional>
#include <optional>
#include <set>
#include <string>

#include "../kernels/block.h"

extern "C" void emulated_cuda_break(int error);

namespace {

using at::IValue;
using at::Tensor;
using torch::jit::Stack;

// Scope in which operators call kernels directly, because autograd, autocast and modes have run before.
class KernelsAlone {
  const c10::InferenceMode normal_{false};
  const c10::impl::ExcludeDispatchKeyGuard guard_{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView |
      c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA,
                           c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

void check(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, "CUDA error: ", cudaGetErrorString(error));
}

// ---- values
// ----------------------------------------------------------------------------------------------------------

using Change = std::function<Tensor(const Tensor&)>;

IValue with_tensors(const IValue& value, const Change& change, c10::Device device) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor.has_value() && tensor->defined() ? std::optional(change(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isDevice()) return device;
  if (value.isGenerator()) return {};
  return value;
}

void each_tensor(const IValue& value, const std::function<void(const Tensor&)>& visit) {
  with_tensors(value, [&](const Tensor& tensor) { return visit(tensor), tensor; }, at::kCPU);
}

// Python numbers have other rules of type promotion than tensors.
Tensor with_promotion_of(Tensor made, const Tensor& original) {
  if (original.unsafeGetTensorImpl()->is_wrapped_number())
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

Tensor empty_on(const Tensor& tensor, c10::Device device) {
  const auto options = tensor.options().device(device).pinned_memory(false);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

// Returns a CPU tensor on device memory.
Tensor alias_of(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

// ---- an operator's arguments and results
// -----------------------------------------------------------------------------

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// Operators whose CPU kernels leave some results empty that other kernels fill. The backward of these
// operators accepts both.
const std::set<std::string> kShapedByCpu = {"aten::_embedding_bag", "aten::_embedding_bag_forward_only",
                                            "aten::native_batch_norm"};

bool holds_tensors(const c10::Type& type) {
  return type.isSubtypeOf(*c10::TensorType::get()) || type.isSubtypeOf(*c10::ListType::ofTensors());
}

class Invocation {
 public:
  Invocation(const c10::OperatorHandle& op, const Stack& stack)
      : op_(op),
        arguments_(stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()), stack.end()) {
    const auto& schema = op.schema();
    for (const c10::Argument& result : schema.returns()) returned_.push_back(argument_of(result));
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      each_tensor(arguments_[i], [&](const Tensor& tensor) {
        if (tensor.is_cuda() && !device_) device_ = tensor.device();
        if (is_written(schema.arguments()[i]) && tensor.numel() == 0) may_resize_ = true;
      });
      if (schema.arguments()[i].name() == "generator") generator_ = i;
    }
  }

  c10::Device device() const { return device_.value_or(c10::Device(at::kCUDA, c10::cuda::current_device())); }

  // Makes the results without reading the device. Returns false if their shapes depend on values, or if the
  // result is a Python number, as in torch.equal.
  bool make_results() {
    if (!op_.schema().returns().empty() && !holds_tensors(*op_.schema().returns()[0].type())) return false;
    if (!may_resize_ &&
        std::none_of(returned_.begin(), returned_.end(), [](auto i) { return !i.has_value(); }))
      return true;
    const auto& tags = op_.getTags();
    if (std::find(tags.begin(), tags.end(), at::Tag::dynamic_output_shape) != tags.end()) return false;
    if (kShapedByCpu.count(op_.operator_name().name) != 0) return make_results_like(at::kCPU);
    return make_results_like(at::kMeta) || make_results_like(at::kCPU);
  }

  void queue() {
    struct Work {
      Invocation invocation;
      Stack arguments, results;
    };
    draw();
    const KernelsAlone guard;
    auto* work = new Work{*this, arguments_for_cpu(), {}};
    for (const IValue& result : results_) work->results.push_back(with_tensors(result, alias_of, at::kCPU));
    work->invocation.arguments_.clear();  // device memory may be reused in stream order, as for a kernel
    work->invocation.results_.clear();
    const std::string name = toString(op_.operator_name());
    const auto run = [](void* pointer) {
      auto& [invocation, arguments, results] = *static_cast<Work*>(pointer);
      invocation.run(arguments, results);
    };
    const auto destroy = [](void* pointer) { delete static_cast<Work*>(pointer); };
    check(emulated_enqueue(name.c_str(), run, destroy, work, c10::cuda::getCurrentCUDAStream(), false));
  }

  // Waits for the stream and runs the operator, as operators do whose shapes depend on values.
  void run_at_once() {
    draw();
    c10::cuda::getCurrentCUDAStream().synchronize();
    const auto to_host = [](const Tensor& tensor) { return tensor.is_cuda() ? tensor.cpu() : tensor; };
    Stack stack;
    for (const IValue& argument : arguments_) stack.push_back(with_tensors(argument, to_host, at::kCPU));
    call(stack);
    const auto to_device = [&](const Tensor& tensor) { return tensor.to(device()); };
    for (std::size_t i = 0; i < returned_.size(); ++i)
      if (!returned_[i]) results_.push_back(with_tensors(stack[i], to_device, device()));
  }

  Stack take_results() {
    Stack stack;
    auto next = results_.begin();
    for (const auto& argument : returned_) stack.push_back(argument ? arguments_[*argument] : *next++);
    return stack;
  }

 private:
  // Returns the index of the argument that the operator returns as this result. In-place operators and `out=`
  // return arguments.
  std::optional<std::size_t> argument_of(const c10::Argument& result) const {
    if (!is_written(result)) return std::nullopt;
    const auto& arguments = op_.schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].alias_info() && *arguments[i].alias_info() == *result.alias_info()) return i;
    return std::nullopt;
  }

  // Makes the results like those of the operator on meta tensors, or on zeros on the CPU.
  bool make_results_like(c10::DeviceType stand_ins) {
    Stack stack, before;
    if (!run_on(stand_ins, stack, before)) return false;
    const auto on_device = [&](const Tensor& tensor) { return empty_on(tensor, device()); };
    for (std::size_t i = 0; i < returned_.size(); ++i)
      if (!returned_[i]) results_.push_back(with_tensors(stack[i], on_device, device()));
    for (std::size_t i = 0; i < before.size(); ++i) {
      if (!is_written(op_.schema().arguments()[i]) || !before[i].isTensor() ||
          !before[i].toTensor().defined())
        continue;
      const Tensor& grown = before[i].toTensor();
      if (arguments_[i].toTensor().sizes() != grown.sizes()) arguments_[i].toTensor().resize_(grown.sizes());
    }
    return true;
  }

  bool run_on(c10::DeviceType stand_ins, Stack& stack, Stack& before) const {
    const KernelsAlone guard;
    const auto stand_in = [&](const Tensor& tensor) {
      Tensor made = empty_on(tensor, stand_ins);
      return with_promotion_of(stand_ins == at::kCPU ? made.zero_() : made, tensor);
    };
    for (const IValue& argument : arguments_) stack.push_back(with_tensors(argument, stand_in, stand_ins));
    before = stack;
    try {
      op_.callBoxed(stack);
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  // Python numbers are arguments of a launch, so their values are copied now.
  Stack arguments_for_cpu() const {
    Stack stack;
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      const bool copies = !is_written(op_.schema().arguments()[i]);
      stack.push_back(with_tensors(
          arguments_[i],
          [&](const Tensor& tensor) {
            if (tensor.is_cuda()) return alias_of(tensor);
            return copies && !tensor.is_sparse() ? with_promotion_of(tensor.clone(), tensor) : tensor;
          },
          at::kCPU));
    }
    return stack;
  }

  // Takes random numbers from the device's generator, like a launch.
  void draw() {
    if (!generator_ && op_.operator_name().name != "aten::native_dropout") return;
    const bool is_given = generator_ && arguments_[*generator_].isGenerator();
    at::Generator generator = is_given ? arguments_[*generator_].toGenerator()
                                       : at::cuda::detail::getDefaultCUDAGenerator(device().index());
    if (!generator.device().is_cuda()) return;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    random_ = at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_cuda_state(4);
  }

  // The kernel reads seed and offset when it runs, from device memory in a captured graph.
  at::Generator generator_now() const {
    const at::PhiloxCudaState& state = *random_;
    const auto seed = static_cast<std::uint64_t>(state.captured_ ? *state.seed_.ptr : state.seed_.val);
    const auto offset = static_cast<std::uint64_t>(state.captured_ ? *state.offset_.ptr : state.offset_.val);
    const std::uint64_t within = state.captured_ ? state.offset_intragraph_ : 0;
    return at::detail::createCPUGenerator((seed + 1) * 0x9E3779B97F4A7C15ull ^
                                          (offset + within + 7) * 0xD1342543DE82EF95ull);
  }

  void call(Stack& stack) const {
    const KernelsAlone guard;
    if (random_ && op_.operator_name().name == "aten::native_dropout") return dropout(stack, generator_now());
    if (random_ && generator_) stack[*generator_] = generator_now();
    op_.callBoxed(stack);
  }

  // The CPU's native_dropout takes no generator.
  static void dropout(Stack& stack, at::Generator generator) {
    const Tensor input = stack[0].toTensor();
    const double p = stack[1].toDouble();
    const bool trains = stack[2].isNone() || stack[2].toBool();
    Tensor mask = at::ones_like(input, input.options().dtype(at::kBool));
    if (trains)
      mask =
          at::empty_like(input, input.options().dtype(at::kFloat)).bernoulli_(1 - p, generator).to(at::kBool);
    const double scale = !trains ? 1 : p == 1 ? 0 : 1 / (1 - p);
    stack = {(input * mask).mul_(scale), mask};
  }

  void run(Stack arguments, const Stack& results) const {  // arguments: a copy, because a graph runs it again
    try {
      call(arguments);
      auto next = results.begin();
      for (std::size_t i = 0; i < returned_.size(); ++i)
        if (!returned_[i]) copy(arguments[i], *next++);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "emulated CUDA: %s: %s\n", toString(op_.operator_name()).c_str(), error.what());
      emulated_cuda_break(cudaErrorAssert);
    }
  }

  static void copy(const IValue& from, const IValue& to) {
    std::vector<Tensor> sources, targets;
    each_tensor(from, [&](const Tensor& tensor) { sources.push_back(tensor); });
    each_tensor(to, [&](const Tensor& tensor) { targets.push_back(tensor); });
    TORCH_CHECK(sources.size() == targets.size(), "other results than those of the stand-ins");
    for (std::size_t i = 0; i < sources.size(); ++i) targets[i].copy_(sources[i]);
  }

  c10::OperatorHandle op_;
  Stack arguments_, results_;                         // results: those that are no arguments
  std::vector<std::optional<std::size_t>> returned_;  // for each result, the index of the returned argument
  std::optional<c10::Device> device_;
  std::optional<std::size_t> generator_;
  std::optional<at::PhiloxCudaState> random_;
  bool may_resize_ = false;
};

void launch(const c10::OperatorHandle& op, Stack* stack) {
  Invocation invocation(op, *stack);
  const c10::cuda::CUDAGuard guard(invocation.device());
  if (invocation.make_results()) {
    invocation.queue();
  } else {
    invocation.run_at_once();
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (IValue& result : invocation.take_results()) stack->push_back(std::move(result));
}

// ---- copies
// ----------------------------------------------------------------------------------------------------------

// Makes a stream wait for all work that another stream has now.
void wait_for(cudaStream_t waiting, const c10::cuda::CUDAStream& other) {
  const c10::cuda::CUDAGuard guard(other.device());
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  check(cudaEventRecord(event, other.stream()));
  check(cudaStreamWaitEvent(waiting, event, 0));
  check(cudaEventDestroy(event));
}

// Between devices, the source's stream copies after the target's stream is ready, as in torch.
Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!self.is_cuda() || !source.is_cuda()) return at::native::copy_(self, source, non_blocking);
  struct Work {
    Tensor to, from;
  };
  const KernelsAlone alone;
  auto* work = new Work{alias_of(self), alias_of(source).expand_as(self)};
  const auto from = c10::cuda::getCurrentCUDAStream(source.device().index());
  const auto to = c10::cuda::getCurrentCUDAStream(self.device().index());
  const bool crosses = source.device() != self.device();
  const c10::cuda::CUDAGuard guard(source.device());
  if (crosses) wait_for(from, to);
  const auto run = [](void* pointer) {
    const KernelsAlone guard;
    const auto* work = static_cast<Work*>(pointer);
    work->to.copy_(work->from);
  };
  const auto destroy = [](void* pointer) { delete static_cast<Work*>(pointer); };
  check(emulated_enqueue("aten::copy_", run, destroy, work, from, crosses));
  if (crosses) wait_for(to, from);
  return self;
}

// Operators that are not replaced: memory, views, reads of a number, and choices of a kernel.
const std::set<std::string> kKept = {"aten::_copy_from",
                                     "aten::_copy_from_and_resize",
                                     "aten::_efficientzerotensor",
                                     "aten::_fused_sdp_choice",
                                     "aten::_has_compatible_shallow_copy_type",
                                     "aten::_local_scalar_dense",
                                     "aten::_nested_view_from_buffer",
                                     "aten::_pin_memory",
                                     "aten::_reshape_alias",
                                     "aten::as_strided",
                                     "aten::empty.memory_format",
                                     "aten::empty_strided",
                                     "aten::is_pinned",
                                     "aten::is_set_to",
                                     "aten::record_stream",
                                     "aten::resize_",
                                     "aten::set_",
                                     "aten::set_.source_Storage",
                                     "aten::set_.source_Storage_storage_offset",
                                     "aten::set_.source_Tensor",
                                     "aten::unfold",
                                     "aten::view",
                                     "aten::view.dtype",
                                     "aten::view_as_complex",
                                     "aten::view_as_real"};

bool is_replaced(const c10::OperatorName& name) {
  if (name.name.rfind("aten::", 0) != 0 || kKept.count(toString(name)) != 0) return false;
  const auto op = c10::Dispatcher::singleton().findOp(name);
  return op && op->hasSchema() && op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
         op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
}

}  // namespace

// Replaces the kernels, and returns their number.
extern "C" __attribute__((visibility("default"))) int emulated_cuda_replace_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  c10::WarningUtils::set_warnAlways(false);
  int count = 0;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!is_replaced(name)) continue;
    library.impl(toString(name).substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&launch>());
    ++count;
  }
  library.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&launch>());
  library.impl("copy_", TORCH_FN(copy));
  return count;
}
