// normalize_cpu.cpp: conversion of uint8 images to normalized floats on the CPU, in one pass over memory and
// on all cores.
#include <torch/csrc/stable/library.h>

#include "core/cpu.h"
#include "core/staging.h"
#include "images/images.h"

namespace flatout {
namespace {

// The constants of interleaved elements, in the order of the elements. A pattern covers at least 192
// elements, so that a loop over them has little overhead. The number of pixels is a multiple of 16, so that
// the elements fill vectors of any width.
struct Pattern {
  std::vector<float> mean, std, inverse, rest;

  explicit Pattern(const std::vector<Channel>& channels) {
    constexpr std::size_t kElements = 192, kPixels = 16;
    const std::size_t step = channels.size() * kPixels, size = (kElements + step - 1) / step * step;
    for (std::size_t i = 0; i < size; ++i) {
      const Channel& channel = channels[i % channels.size()];
      mean.push_back(channel.mean);
      std.push_back(channel.std);
      inverse.push_back(channel.inverse);
      rest.push_back(channel.rest);
    }
  }
};

template <int C>
FLATOUT_HD void interleave(const uint8_t* __restrict from, int64_t plane, int64_t channels,
                           uint8_t* __restrict to, int64_t pixels) {
  if constexpr (C != 0) {
    for (int64_t p = 0; p < pixels; ++p)
      for (int c = 0; c < C; ++c) to[p * C + c] = from[c * plane + p];
  } else {
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t p = 0; p < pixels; ++p) to[p * channels + c] = from[c * plane + p];
  }
}

template <int C>
FLATOUT_HD void separate(const uint8_t* __restrict from, int64_t plane, int64_t channels,
                         uint8_t* __restrict to, int64_t pixels) {
  if constexpr (C != 0) {
    for (int64_t p = 0; p < pixels; ++p)
      for (int c = 0; c < C; ++c) to[c * plane + p] = from[p * C + c];
  } else {
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t p = 0; p < pixels; ++p) to[c * plane + p] = from[p * channels + c];
  }
}

FLATOUT_HD void normalize_row(const uint8_t* __restrict from, float* __restrict to, int64_t count,
                              const Channel channel) {
  for (int64_t i = 0; i < count; ++i) to[i] = normalize(static_cast<float>(from[i]), channel);
}

FLATOUT_HD void normalize_row(const uint8_t* __restrict from, float* __restrict to, int64_t count,
                              const float* __restrict mean, const float* __restrict std,
                              const float* __restrict inverse, const float* __restrict rest) {
  for (int64_t i = 0; i < count; ++i)
    to[i] = normalize(static_cast<float>(from[i]), Channel{mean[i], std[i], inverse[i], rest[i]});
}

// The pieces `begin` to `end` of a batch. A piece has some pixels of one image, in all channels. If the
// orders differ, bytes are first copied into the order of the output, in a buffer that stays in L1. Floats
// would be four times as many bytes.
template <class T, int C>
struct NormalizePieces {
  const ImageBatch& batch;
  const std::vector<Channel>& channels;
  const Pattern& pattern;
  int64_t piece_pixels, pieces_of_image;
  int64_t begin, end;
  uint8_t* bytes;  // piece_pixels * channels
  float* floats;   // the larger of the pattern's size and kBlock

  [[gnu::always_inline]] void operator()() const {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t image = piece / pieces_of_image, first = piece % pieces_of_image * piece_pixels;
      const int64_t count = std::min(piece_pixels, batch.pixels - first);
      normalize_piece(image * batch.pixels * batch.channels, first, count);
    }
  }

 private:
  FLATOUT_HD void normalize_piece(int64_t image, int64_t first, int64_t count) const {
    const int64_t channel_count = C == 0 ? batch.channels : C;
    const bool same = batch.in_order == batch.out_order;
    const uint8_t* in = batch.in + image;
    T* out = static_cast<T*>(batch.out) + image;
    if (batch.out_order == Order::kInterleaved) {
      const uint8_t* from = in + first * channel_count;
      if (!same) {
        interleave<C>(in + first, batch.pixels, channel_count, bytes, count);
        from = bytes;
      }
      interleaved(from, out + first * channel_count, count * channel_count);
    } else {
      if (!same) separate<C>(in + first * channel_count, count, channel_count, bytes, count);
      for (int64_t c = 0; c < channel_count; ++c)
        row(same ? in + c * batch.pixels + first : bytes + c * count, out + c * batch.pixels + first, count,
            channels[c]);
    }
  }

  FLATOUT_HD void row(const uint8_t* from, T* to, int64_t count, const Channel& channel) const {
    if constexpr (std::is_same_v<T, float>) {
      normalize_row(from, to, count, channel);
    } else {
      for (int64_t i = 0; i < count; i += kBlock) {
        const int64_t n = std::min<int64_t>(kBlock, count - i);
        normalize_row(from + i, floats, n, channel);
        narrow(floats, to + i, static_cast<uint32_t>(n));
      }
    }
  }

  FLATOUT_HD void interleaved(const uint8_t* from, T* to, int64_t count) const {
    if (C == 1) return row(from, to, count, channels[0]);
    const auto size = static_cast<int64_t>(pattern.mean.size());
    for (int64_t i = 0; i < count; i += size) {
      const int64_t n = std::min(size, count - i);
      float* target = floats;
      if constexpr (std::is_same_v<T, float>) target = to + i;
      normalize_row(from + i, target, n, pattern.mean.data(), pattern.std.data(), pattern.inverse.data(),
                    pattern.rest.data());
      if constexpr (!std::is_same_v<T, float>) narrow(floats, to + i, static_cast<uint32_t>(n));
    }
  }
};

template <class T, int C>
void normalize_batch(const ImageBatch& batch, const std::vector<Channel>& channels) {
  constexpr int64_t kPieceBytes = 8192, kWorthAThread = 2 * int64_t{kChunk};  // bytes, elements
  const Pattern pattern(channels);
  const int64_t piece_pixels = std::max<int64_t>(kPieceBytes / batch.channels, 16);
  const int64_t pieces_of_image = (batch.pixels + piece_pixels - 1) / piece_pixels;
  const int64_t pieces = batch.images * pieces_of_image;
  const int64_t grain = std::max<int64_t>(kWorthAThread * pieces / batch.elements(), 1);
  torch::stable::parallel_for(0, pieces, grain, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> bytes(piece_pixels * batch.channels);
    std::vector<float> floats(std::max<std::size_t>(pattern.mean.size(), kBlock));
    run_vectorized(NormalizePieces<T, C>{batch, channels, pattern, piece_pixels, pieces_of_image, begin, end,
                                         bytes.data(), floats.data()});
  });
}

Tensor normalize_images(const Tensor& images, const std::vector<double>& mean, const std::vector<double>& std,
                        ScalarType dtype, bool channels_last) {
  const Normalization job = prepare_normalization(images, mean, std, dtype, channels_last);
  if (job.batch.elements() == 0) return job.out;
  with_image_dtype(dtype, [&]<class T>(T*) {
    switch (job.batch.channels) {
      case 1:
        return normalize_batch<T, 1>(job.batch, job.channels);
      case 3:
        return normalize_batch<T, 3>(job.batch, job.channels);
      case 4:
        return normalize_batch<T, 4>(job.batch, job.channels);
      default:
        return normalize_batch<T, 0>(job.batch, job.channels);
    }
  });
  return job.out;
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CPU, m) {
  m.impl("normalize_images", TORCH_BOX(&flatout::normalize_images));
}
