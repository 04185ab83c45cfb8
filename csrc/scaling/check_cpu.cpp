// check_cpu.cpp: unscale + check + norm on the CPU: one read of the gradients.
#include <torch/csrc/stable/library.h>

#include "core/cpu.h"
#include "core/staging.h"
#include "scaling/check.h"

namespace flatout {
namespace {

template <class Acc>
struct Vector16;
template <>
struct Vector16<float> {
  typedef float type __attribute__((vector_size(16)));
};
template <>
struct Vector16<double> {
  typedef double type __attribute__((vector_size(16)));
};

// Sum of squares and finiteness of a block, in a fixed order. Explicit 16-byte vectors: every CPU has them,
// they are wide enough to keep up with memory, and the order of additions is the same on all of them.
template <class Acc>
FLATOUT_HD Partial check_block(const Acc* x, uint32_t count, Acc inv_scale) {
  using Vector = typename Vector16<Acc>::type;
  constexpr uint32_t kWidth = 16 / sizeof(Acc), kVectors = 4;
  Lane<Vector> lanes[kVectors] = {};  // 4 x 4 floats or 4 x 2 doubles
  uint32_t i = 0;
  for (; i + kVectors * kWidth <= count; i += kVectors * kWidth) {
#pragma GCC unroll 4
    for (uint32_t v = 0; v < kVectors; ++v) {
      Vector gradient;
      __builtin_memcpy(&gradient, x + i + v * kWidth, sizeof(gradient));
      lanes[v].add(gradient, gradient * inv_scale);
    }
  }
  Lane<Acc> rest{0, 0};
  for (; i < count; ++i) rest.add(x[i], x[i] * inv_scale);
  Partial partial{static_cast<double>(rest.sum), static_cast<double>(rest.bad)};
  for (const Lane<Vector>& lane : lanes)
    for (uint32_t w = 0; w < kWidth; ++w) partial.add({lane.sum[w], lane.bad[w]});
  return partial;
}

template <class T>
FLATOUT_HD void multiply(T* __restrict x, uint32_t count, T factor) {
  for (uint32_t i = 0; i < count; ++i) x[i] *= factor;
}

// One chunk of one tensor; with Rewrite the gradients are multiplied by inv_scale on the way.
template <class T, bool Rewrite>
struct CheckChunk {
  using Acc = compute_t<T>;
  T* gradients;
  uint32_t count;
  Acc inv_scale;
  Partial* partial;

  [[gnu::always_inline]] void operator()() const {
    Partial total{0, 0};
    alignas(64) Acc buffer[kBlock];
    for (uint32_t begin = 0; begin < count; begin += kBlock) {
      const uint32_t n = begin + kBlock < count ? kBlock : count - begin;
      Acc* x;
      if constexpr (std::is_same_v<T, Acc>) {
        x = gradients + begin;
      } else {
        widen(gradients + begin, buffer, n);
        x = buffer;
      }
      total.add(check_block(x, n, inv_scale));
      if constexpr (Rewrite) {
        multiply(x, n, inv_scale);
        if constexpr (!std::is_same_v<T, Acc>) narrow(x, gradients + begin, n);
      }
    }
    *partial = total;
  }
};

template <class T>
struct ScaleChunk {
  T* gradients;
  uint32_t count;
  compute_t<T> factor;

  [[gnu::always_inline]] void operator()() const {
    if constexpr (std::is_same_v<T, compute_t<T>>) {
      multiply(gradients, count, factor);
    } else {
      alignas(64) float buffer[kBlock];
      for (uint32_t begin = 0; begin < count; begin += kBlock) {
        const uint32_t n = begin + kBlock < count ? kBlock : count - begin;
        widen(gradients + begin, buffer, n);
        multiply(buffer, n, factor);
        narrow(buffer, gradients + begin, n);
      }
    }
  }
};

template <bool Rewrite>
Partial run_check(const GradCheck& check) {
  const std::vector<uint32_t> first = first_chunks(check.tensors);
  std::vector<Partial> partials(first.back());
  const double inv_scale = check.inv_scale.get();
  with_dtype(check.dtype, [&]<class T>(T*) {
    const auto inv = static_cast<compute_t<T>>(inv_scale);
    for_each_chunk(check.tensors, first, [&](uint32_t t, int64_t begin, uint32_t count, uint32_t chunk) {
      T* gradients = static_cast<T*>(check.tensors[t].address[0]) + begin;
      // An inv_scale of 1 leaves every gradient as it is: nothing to write.
      if (Rewrite && inv_scale != 1) {
        run_vectorised(CheckChunk<T, true>{gradients, count, inv, &partials[chunk]});
      } else {
        run_vectorised(CheckChunk<T, false>{gradients, count, inv, &partials[chunk]});
      }
    });
  });
  Partial total{0, 0};
  for (const Partial& partial : partials) total.add(partial);
  return total;
}

void set_scalar(const Tensor& tensor, double value) {
  if (tensor.scalar_type() == ScalarType::Double) {
    *static_cast<double*>(tensor.data_ptr()) = value;
  } else {
    *static_cast<float*>(tensor.data_ptr()) = static_cast<float>(value);
  }
}

std::tuple<Tensor, Tensor, Tensor> unscale_and_check(const TensorList& grads,
                                                     const std::optional<Tensor>& inv_scale,
                                                     std::optional<double> max_norm) {
  const GradCheck check = prepare_check(grads, inv_scale, max_norm);
  auto [found_inf, grad_norm, grad_factor] = new_verdict(grads[0]);
  const Verdict verdict = conclude(run_check<false>(check), check.inv_scale.get(), check.max_norm);
  set_scalar(found_inf, verdict.found_inf);
  set_scalar(grad_norm, verdict.grad_norm);
  set_scalar(grad_factor, verdict.grad_factor);
  return {found_inf, grad_norm, grad_factor};
}

std::tuple<Tensor, Tensor> unscale_and_check_(const TensorList& grads,
                                              const std::optional<Tensor>& inv_scale) {
  const GradCheck check = prepare_check(grads, inv_scale, std::nullopt);
  auto [found_inf, grad_norm, grad_factor] = new_verdict(grads[0]);
  const Verdict verdict = conclude(run_check<true>(check), check.inv_scale.get(), check.max_norm);
  set_scalar(found_inf, verdict.found_inf);
  set_scalar(grad_norm, verdict.grad_norm);
  return {found_inf, grad_norm};
}

void scale_(const TensorList& grads, const Tensor& factor) {
  check_leader(grads, "grads");
  const double value = device_scalar(factor, "factor", grads[0], 1).get();
  if (value == 1) return;
  const std::vector<FlatTensor> tensors = flatten({&grads}, nullptr);
  const std::vector<uint32_t> first = first_chunks(tensors);
  with_dtype(grads[0].scalar_type(), [&]<class T>(T*) {
    for_each_chunk(tensors, first, [&](uint32_t t, int64_t begin, uint32_t count, uint32_t) {
      run_vectorised(ScaleChunk<T>{static_cast<T*>(tensors[t].address[0]) + begin, count,
                                   static_cast<compute_t<T>>(value)});
    });
  });
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CPU, m) {
  m.impl("unscale_and_check", TORCH_BOX(&flatout::unscale_and_check));
  m.impl("unscale_and_check_", TORCH_BOX(&flatout::unscale_and_check_));
  m.impl("scale_", TORCH_BOX(&flatout::scale_));
}
