// play_cpu.cpp: test-only. The host plays the blocks and threads of the check's CUDA kernels over the same
// tables, views, splits and thread functions, so that their index arithmetic, and that one block concludes
// with the partials of all, is proved where there is no GPU.
#include <torch/csrc/stable/library.h>

#include <functional>
#include <limits>
#include <random>

#include "scaling/check.h"
#include "scaling/check_chunk.h"
#include "scaling/conclusion.h"

namespace flatout {
namespace {

constexpr int kSmallCapacity = 3;  // tensors per table: a handful of tensors needs several "launches"
constexpr double kUnwritten = std::numeric_limits<double>::quiet_NaN();

// One check as check.cu runs it, with the blocks of all launches in an order that `seed` shuffles:
// (found_inf, grad_norm, grad_factor, blocks that concluded).
std::tuple<double, double, double, int64_t> play_check_(const TensorList& grads, double inv_scale,
                                                        double max_norm, double norm_type, bool rewrite,
                                                        int64_t threads, int64_t seed) {
  const Tensor& leader = leader_of(grads, std::nullopt);
  const FlatGrads flat = flatten_grads(grads);
  Check check = prepare_check(flat, leader, std::nullopt, max_norm, norm_type);
  check.unscaling.factor.value = inv_scale;
  const auto width = static_cast<uint32_t>(threads);
  uint32_t chunks = 0, finished = 0;
  int64_t concluded = 0;
  for (const GradList& list : check.lists)
    for (const FlatTensor& tensor : *list.tensors) chunks += chunks_of(tensor.numel);
  std::vector<Partial> partials(chunks, {kUnwritten, kUnwritten});
  float found_inf = 0;
  double grad_norm = 0, grad_factor = 0;
  const Conclusion conclusion{partials.data(), chunks,
                              {&finished, 0},  check.unscaling,
                              check.max_norm,  {&found_inf, &grad_norm, &grad_factor, /*wide=*/true}};
  std::vector<std::function<void()>> blocks;
  with_norm(check.norm, [&]<Norm kNorm>(std::integral_constant<Norm, kNorm>) {
    uint32_t first_partial = 0;
    for (const GradList& list : check.lists) {
      with_dtype(list.dtype, [&]<class T>(T*) {
        using Table = GradTable<kSmallCapacity>;
        for_each_table<Table>(*list.tensors, [&](const Table& table) {
          for (uint32_t block = 0; block < check_blocks<T>(table.chunks()); ++block)
            blocks.emplace_back([=, &conclusion, &finished, &concluded] {
              const auto inverse = static_cast<compute_t<T>>(inv_scale);
              const uint32_t begin = block * kChunksOfBlock<T>,
                             end = std::min(begin + kChunksOfBlock<T>, table.chunks());
              for (uint32_t chunk = begin; chunk < end; ++chunk) {
                const auto view = view_chunk<T>(table, chunk);
                Partial sum{0, 0};
                for (uint32_t thread = 0; thread < width; ++thread)
                  sum.add<kNorm>(rewrite ? check_chunk<kNorm, true, T>(view, inverse, thread, width)
                                         : check_chunk<kNorm, false, T>(view, inverse, thread, width));
                conclusion.partials[first_partial + chunk] = sum;
              }
              if ((finished += end - begin) != conclusion.chunks) return;
              Partial total{0, 0};
              for (uint32_t thread = 0; thread < width; ++thread)
                total.add<kNorm>(add_partials<kNorm, 8>(conclusion.partials, chunks, thread, width));
              conclusion.write<kNorm>(total);
              ++concluded;
            });
          first_partial += table.chunks();
        });
      });
    }
  });
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(static_cast<uint32_t>(seed)));
  for (const auto& block : blocks) block();
  return {found_inf, grad_norm, grad_factor, concluded};
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_FRAGMENT(flatout_testing, m) {
  m.def(
      "check_(Tensor(a!)[] grads, *, float inv_scale, float max_norm, float norm_type, bool rewrite, "
      "int threads, int seed) -> (float, float, float, int)");
}

STABLE_TORCH_LIBRARY_IMPL(flatout_testing, CPU, m) { m.impl("check_", TORCH_BOX(&flatout::play_check_)); }
