// check_cpu.cpp: unscale + check + norm on the CPU, in one read of the gradients.
#include <torch/csrc/stable/library.h>

#include <span>

#include "core/cpu.h"
#include "core/staging.h"
#include "scaling/check.h"
#include "scaling/conclusion.h"

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

// Returns the norm and finiteness of a block. Explicit vectors of 16 bytes make the order of additions the
// same on all CPUs. Every CPU has such vectors, and they are wide enough for the memory bandwidth.
template <Norm kNorm, class Acc>
FLATOUT_HD Partial check_block(const Acc* x, uint32_t count, Acc inv_scale) {
  using Vector = typename Vector16<Acc>::type;
  constexpr uint32_t kWidth = 16 / sizeof(Acc), kVectors = 4;
  Lane<kNorm, Vector> lanes[kVectors] = {};  // 4 x 4 floats or 4 x 2 doubles
  uint32_t i = 0;
  for (; i + kVectors * kWidth <= count; i += kVectors * kWidth) {
    prefetch_ahead(x + i, sizeof(lanes[0].norm) * kVectors, 4096);
#pragma GCC unroll 4
    for (uint32_t v = 0; v < kVectors; ++v) {
      Vector gradient;
      __builtin_memcpy(&gradient, x + i + v * kWidth, sizeof(gradient));
      lanes[v].add(gradient, gradient * inv_scale);
    }
  }
  Lane<kNorm, Acc> rest{0, 0};
  for (; i < count; ++i) rest.add(x[i], x[i] * inv_scale);
  Partial partial{static_cast<double>(rest.norm), static_cast<double>(rest.bad)};
  for (const Lane<kNorm, Vector>& lane : lanes)
    for (uint32_t w = 0; w < kWidth; ++w) partial.add<kNorm>({lane.norm[w], lane.bad[w]});
  return partial;
}

template <class T>
FLATOUT_HD void multiply(T* __restrict x, uint32_t count, T factor) {
  for (uint32_t i = 0; i < count; ++i) x[i] *= factor;
}

// Check of one chunk of one tensor. With `rewrite`, the check also multiplies the gradients in memory by
// inv_scale.
template <class T, Norm kNorm>
struct CheckChunk {
  using Acc = compute_t<T>;
  T* gradients;
  uint32_t count;
  Acc inv_scale;
  bool rewrite;
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
        prefetch_ahead(gradients + begin, n * sizeof(T), 4096);
        widen(gradients + begin, buffer, n);
        x = buffer;
      }
      total.add<kNorm>(check_block<kNorm>(x, n, inv_scale));
      if (rewrite) {
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

template <class T, Norm kNorm>
std::vector<Partial> partials_of(const std::vector<FlatTensor>& tensors, double inv_scale, bool rewrite) {
  const std::vector<uint32_t> first = first_chunks(tensors);
  std::vector<Partial> partials(first.back());
  for_each_chunk(tensors, first, [&](uint32_t t, int64_t begin, uint32_t count, uint32_t chunk) {
    run_vectorized(CheckChunk<T, kNorm>{static_cast<T*>(tensors[t].address[0]) + begin, count,
                                        static_cast<compute_t<T>>(inv_scale), rewrite, &partials[chunk]});
  });
  return partials;
}

// Adds in the order of the chunks, so that the sum does not depend on the number of threads.
template <Norm kNorm>
Partial sum(std::span<const Partial> partials) {
  Partial total{0, 0};
  for (const Partial& partial : partials) total.add<kNorm>(partial);
  return total;
}

CheckResult unscale_and_check(const TensorList& grads, const std::optional<Tensor>& inv_scale,
                              std::optional<double> max_norm, double norm_type) {
  const Tensor& leader = leader_of(grads, inv_scale);
  const FlatGrads flat = flatten_grads(grads);
  return check_on_cpu(prepare_check(flat, leader, inv_scale, max_norm, norm_type), leader);
}

std::tuple<Tensor, Tensor> unscale_and_check_(const TensorList& grads,
                                              const std::optional<Tensor>& inv_scale) {
  const FlatGrads flat = flatten_grads(grads);
  const auto [found_inf, grad_norm, grad_factor] =
      check_on_cpu(prepare_rewrite(flat, grads, inv_scale), leader_of(grads, inv_scale));
  return {found_inf, grad_norm};
}

Tensor grad_norms(const TensorList& grads, const std::optional<Tensor>& inv_scale, double norm_type) {
  STD_TORCH_CHECK(!grads.empty(), "grads must hold at least one tensor");
  const FlatGrads flat = flatten_grads(grads);
  const Check check = prepare_check(flat, grads[0], inv_scale, std::nullopt, norm_type);
  const Tensor result = new_norms(check, grads);
  std::map<ScalarType, std::vector<uint32_t>> positions;
  for (std::size_t i = 0; i < grads.size(); ++i)
    positions[grads[i].scalar_type()].push_back(static_cast<uint32_t>(i));
  const Norms norms{nullptr, {}, {}, result.data_ptr(), result.scalar_type() == ScalarType::Double, true};
  with_norm(check.norm, [&]<Norm kNorm>(std::integral_constant<Norm, kNorm>) {
    for (const auto& [dtype, tensors] : flat)
      with_dtype(dtype, [&]<class T>(T*) {
        const std::vector<uint32_t> first = first_chunks(tensors);
        const std::vector<Partial> partials =
            partials_of<T, kNorm>(tensors, check.unscaling.get(), /*rewrite=*/false);
        for (std::size_t t = 0; t < tensors.size(); ++t)
          norms.write<kNorm>(positions[dtype][t], first[t + 1] - first[t],
                             sum<kNorm>(std::span(partials).subspan(first[t], first[t + 1] - first[t])));
      });
  });
  return result;
}

void scale_(const TensorList& grads, const Tensor& factor) {
  const FlatGrads flat = flatten_grads(grads);
  check_apart({{grads, "grads"}});
  const double value = device_scalar(factor, "factor", grads.empty() ? factor : grads[0], 1).get();
  for (const auto& [dtype, tensors] : flat) scale_on_cpu(tensors, 0, dtype, value);
}

}  // namespace

void scale_on_cpu(const std::vector<FlatTensor>& tensors, int slot, ScalarType dtype, double factor) {
  if (factor == 1) return;
  with_dtype(dtype, [&]<class T>(T*) {
    for_each_chunk(tensors, first_chunks(tensors), [&](uint32_t t, int64_t begin, uint32_t count, uint32_t) {
      run_vectorized(ScaleChunk<T>{static_cast<T*>(tensors[t].address[slot]) + begin, count,
                                   static_cast<compute_t<T>>(factor)});
    });
  });
}

CheckResult check_on_cpu(const Check& check, const Tensor& leader) {
  CheckResult result = new_verdict(check, leader);
  const double inv_scale = check.unscaling.get();
  const bool rewrite = check.rewrite && inv_scale != 1;  // a factor of 1 changes nothing
  with_norm(check.norm, [&]<Norm kNorm>(std::integral_constant<Norm, kNorm>) {
    Partial total{0, 0};
    for (const GradList& list : check.lists)
      with_dtype(list.dtype, [&]<class T>(T*) {
        total.add<kNorm>(sum<kNorm>(partials_of<T, kNorm>(*list.tensors, inv_scale, rewrite)));
      });
    const Verdict verdict = conclude<kNorm>(total, inv_scale, check.max_norm);
    address_of(result).write(verdict);
    if (check.unscaling.loss_scale.scale != nullptr)
      check.unscaling.loss_scale.write_next(verdict.found_inf != 0);
  });
  return result;
}

}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CPU, m) {
  m.impl("unscale_and_check", TORCH_BOX(&flatout::unscale_and_check));
  m.impl("unscale_and_check_", TORCH_BOX(&flatout::unscale_and_check_));
  m.impl("grad_norms", TORCH_BOX(&flatout::grad_norms));
  m.impl("scale_", TORCH_BOX(&flatout::scale_));
}
