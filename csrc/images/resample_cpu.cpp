// resample_cpu.cpp: crop, antialiased resize, flip and normalization of one image, in one call.
//
// The bytes after the resize are those of Pillow's bilinear filter. Both use weights of 22 fractional bits,
// two passes, and bytes between the passes. The floats are those of torchvision's ToTensor and Normalize.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <cstring>

#include "core/cpu.h"
#include "images/images.h"

namespace flatout {
namespace {

constexpr int kFraction = 22;  // bits of a weight after the point. 8 bits of a byte and 2 bits more fit above
constexpr int32_t kHalf = 1 << (kFraction - 1);

FLATOUT_HD uint8_t rounded(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kFraction, 0, 255)); }

// Pillow's rounding: a half is added, and the result is truncated toward zero.
inline int64_t rounded_up(double value) {
  const double shifted = value + 0.5;
  return static_cast<int64_t>(shifted);
}

// Sums of the channels of a pixel, which one instruction updates.
using Sums = int32_t __attribute__((vector_size(16)));

// The first C of four bytes at `from`, of which all may be read before `end`.
template <int C>
FLATOUT_HD Sums load_pixel(const uint8_t* from, const uint8_t* end) {
  using Bytes = uint8_t __attribute__((vector_size(4)));
  Bytes bytes{};
  if (end - from >= 4)
    std::memcpy(&bytes, from, 4);
  else
    std::memcpy(&bytes, from, C);
  return __builtin_convertvector(bytes, Sums);
}

// Weights of the inputs that make up each output along one axis. Outputs are those of a window.
struct Axis {
  std::vector<int32_t> first, count, weights;
  int32_t taps;
  bool is_copy;

  Axis(int64_t in, int64_t out, int64_t window_first, int64_t window_size) : is_copy(in == out) {
    const double scale = static_cast<double>(in) / static_cast<double>(out), width = std::max(scale, 1.0);
    taps = static_cast<int32_t>(std::ceil(width)) * 2 + 1;
    weights.assign(static_cast<std::size_t>(window_size) * taps, 0);
    std::vector<double> exact(taps);
    for (int64_t i = 0; i < window_size; ++i) {
      const double center = (static_cast<double>(window_first + i) + 0.5) * scale;
      const auto begin = std::max<int64_t>(rounded_up(center - width), 0);
      const auto end = std::min<int64_t>(rounded_up(center + width), in);
      double sum = 0;
      for (int64_t j = begin; j < end; ++j) {
        const double distance = std::abs((static_cast<double>(j) - center + 0.5) * (1.0 / width));
        sum += exact[j - begin] = distance < 1 ? 1 - distance : 0;
      }
      first.push_back(static_cast<int32_t>(begin));
      count.push_back(static_cast<int32_t>(end - begin));
      for (int64_t j = 0; j < end - begin; ++j) {
        const double weight = sum != 0 ? exact[j] / sum : exact[j];
        weights[i * taps + j] = static_cast<int32_t>(rounded_up(weight * (1 << kFraction)));
      }
    }
  }

  [[nodiscard]] int64_t size() const { return static_cast<int64_t>(first.size()); }
};

// Bytes of a crop [rows, columns, C], where its rows begin, and where the image ends.
struct Crop {
  const uint8_t* data;
  int64_t row_bytes;
  const uint8_t* end;
};

// Resizes a crop. `T` is uint8_t for bytes, or float for values from `table`.
template <class T, int C>
struct Resample {
  Crop crop;
  const Axis &horizontal, &vertical;
  const float* table;  // [C][256]
  bool flip;
  uint8_t* rows;   // resized rows of the crop, [rows][outputs of a row][C]; one if columns are resized first
  uint8_t* bytes;  // one row of the crop or of the outputs, whichever is longer
  int32_t* sums;   // as long as `bytes`
  T* out;          // [C][outputs of a column][outputs of a row]

  FLATOUT_HD void horizontal_first() const {
    const int64_t top = vertical.first[0], width = horizontal.size() * C;
    for (int64_t y = top; y < vertical.first.back() + vertical.count.back(); ++y)
      resize_row(crop.data + y * crop.row_bytes, crop.end, 0, rows + (y - top) * width);
    for (int64_t y = 0; y < vertical.size(); ++y) {
      const uint8_t* first = rows + (vertical.first[y] - top) * width;
      if (!vertical.is_copy) add_rows(first, width, width, y);
      write(vertical.is_copy ? first : bytes, y);
    }
  }

  FLATOUT_HD void vertical_first() const {
    const int64_t left = int64_t{horizontal.first[0]} * C;
    const int64_t width = (horizontal.first.back() + horizontal.count.back()) * int64_t{C} - left;
    for (int64_t y = 0; y < vertical.size(); ++y) {
      add_rows(crop.data + vertical.first[y] * crop.row_bytes + left, crop.row_bytes, width, y);
      resize_row(bytes, bytes + width, horizontal.first[0], rows);
      write(rows, y);
    }
  }

 private:
  // Resizes a row of the crop whose columns before `begin` are left out.
  FLATOUT_HD void resize_row(const uint8_t* __restrict from, const uint8_t* end, int32_t begin,
                             uint8_t* __restrict to) const {
    const int64_t width = horizontal.size();
    if (horizontal.is_copy) {
      for (int64_t i = 0; i < width * C; ++i) to[i] = from[int64_t{horizontal.first[0] - begin} * C + i];
      return;
    }
    for (int64_t x = 0; x < width; ++x) {
      const uint8_t* in = from + int64_t{horizontal.first[x] - begin} * C;
      const int32_t* weight = &horizontal.weights[x * horizontal.taps];
      Sums sum{kHalf, kHalf, kHalf, kHalf};
      for (int32_t j = 0; j < horizontal.count[x]; ++j, in += C) sum += load_pixel<C>(in, end) * weight[j];
      for (int c = 0; c < C; ++c) to[x * C + c] = rounded(sum[c]);
    }
  }

  // Sets `bytes` to the weighted sum of the rows of output `y`, the first of which is `from`.
  FLATOUT_HD void add_rows(const uint8_t* __restrict from, int64_t row_bytes, int64_t count,
                           int64_t y) const {
    const int32_t* weights = &vertical.weights[y * vertical.taps];
    for (int64_t i = 0; i < count; ++i) sums[i] = kHalf;
    for (int32_t j = 0; j < vertical.count[y]; ++j) {
      const int32_t weight = weights[j];
      const uint8_t* row = from + j * row_bytes;
      for (int64_t i = 0; i < count; ++i) sums[i] += row[i] * weight;
    }
    for (int64_t i = 0; i < count; ++i) bytes[i] = rounded(sums[i]);
  }

  FLATOUT_HD void write(const uint8_t* __restrict from, int64_t y) const {
    const int64_t width = horizontal.size();
    for (int c = 0; c < C; ++c) {
      T* __restrict to = out + (c * vertical.size() + y) * width;
      for (int64_t x = 0; x < width; ++x) {
        const uint8_t byte = from[(flip ? width - 1 - x : x) * C + c];
        if constexpr (std::is_same_v<T, float>)
          to[x] = table[256 * c + byte];
        else
          to[x] = byte;
      }
    }
  }
};

template <class T, int C>
void run_resample(const Crop& crop, const Axis& horizontal, const Axis& vertical,
                  const std::vector<float>& table, bool flip, bool vertical_first, T* out) {
  const int64_t width = horizontal.size() * C;
  const int64_t height =
      vertical_first ? 1 : vertical.first.back() + vertical.count.back() - vertical.first[0];
  std::vector<uint8_t> rows(height * width), bytes(std::max(width, crop.row_bytes));
  std::vector<int32_t> sums(bytes.size());
  const Resample<T, C> resample{crop,        horizontal,   vertical,    table.data(), flip,
                                rows.data(), bytes.data(), sums.data(), out};
  run_vectorized([&]() __attribute__((always_inline)) {
    vertical_first ? resample.vertical_first() : resample.horizontal_first();
  });
}

void check_part(const char* name, const std::vector<int64_t>& part, int64_t height, int64_t width) {
  STD_TORCH_CHECK(part.size() == 4, name, " must be [top, left, height, width], got ", part.size(),
                  " numbers");
  STD_TORCH_CHECK(part[0] >= 0 && part[1] >= 0 && part[2] > 0 && part[3] > 0 && part[2] <= height - part[0] &&
                      part[3] <= width - part[1],
                  name, " must be within ", height, " x ", width, ", got [", part[0], ", ", part[1], ", ",
                  part[2], ", ", part[3], "]");
}

Tensor resample_image(const Tensor& image, const std::vector<int64_t>& box, const std::vector<int64_t>& size,
                      const std::vector<int64_t>& window, bool flip, bool vertical_first,
                      const std::vector<double>& mean, const std::vector<double>& std) {
  STD_TORCH_CHECK(image.dim() == 3 && image.scalar_type() == ScalarType::Byte && image.is_contiguous(),
                  "image must be contiguous uint8 of 3 dimensions [H, W, C], got ", image.dim(), " of ",
                  torch::headeronly::toString(image.scalar_type()));
  const int64_t channels = image.size(2);
  STD_TORCH_CHECK(channels == 1 || channels == 3, "image must have 1 or 3 channels, got ", channels);
  check_part("box", box, image.size(0), image.size(1));
  STD_TORCH_CHECK(size.size() == 2 && size[0] > 0 && size[1] > 0 && size[0] <= 1 << 20 && size[1] <= 1 << 20,
                  "size must be two numbers from 1 to 2^20");
  check_part("window", window, size[0], size[1]);
  const bool is_float = !mean.empty();
  const std::vector<Channel> constants =
      is_float ? check_channels(mean, std, channels) : std::vector<Channel>(channels, Channel::of(0, 1));
  std::vector<float> table;
  for (const Channel& channel : constants)
    for (int value = 0; value < 256; ++value) table.push_back(normalize(static_cast<float>(value), channel));
  const auto* pixels = static_cast<const uint8_t*>(image.const_data_ptr());
  const int64_t row_bytes = image.size(1) * channels;
  const Crop crop{pixels + box[0] * row_bytes + box[1] * channels, row_bytes,
                  pixels + image.size(0) * row_bytes};
  const Axis vertical(box[2], size[0], window[0], window[2]),
      horizontal(box[3], size[1], window[1], window[3]);
  Tensor out =
      torch::stable::empty({channels, window[2], window[3]}, is_float ? ScalarType::Float : ScalarType::Byte,
                           std::nullopt, image.device(), std::nullopt, std::nullopt);
  const auto run = [&]<class T>(T* values) {
    return channels == 1
               ? run_resample<T, 1>(crop, horizontal, vertical, table, flip, vertical_first, values)
               : run_resample<T, 3>(crop, horizontal, vertical, table, flip, vertical_first, values);
  };
  is_float ? run(static_cast<float*>(out.data_ptr())) : run(static_cast<uint8_t*>(out.data_ptr()));
  return out;
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CPU, m) { m.impl("resample_image", TORCH_BOX(&flatout::resample_image)); }
