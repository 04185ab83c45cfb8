// resample_cpu.cpp: crop, antialiased resize, flip and normalization of images, in one call.
//
// The bytes after the resize are those of Pillow's bilinear filter. Both use weights of 22 fractional bits,
// two passes, and bytes between the passes. The floats are those of torchvision's ToTensor and Normalize.
#include <torch/csrc/stable/library.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <span>

#include "core/cpu.h"
#include "images/images.h"

namespace flatout {
namespace {

static_assert(std::endian::native == std::endian::little, "a pixel is a word whose lowest byte is red");

constexpr int kFraction = 22;  // bits of a weight after the point. 8 bits of a byte and 2 bits more fit above
constexpr uint32_t kHalf = 1 << (kFraction - 1);
constexpr int64_t kChannels = 3;

// Eight pixels, each a word of red, green, blue and an unused byte.
constexpr int64_t kPixels = 8;
using Pixels = uint32_t __attribute__((vector_size(4 * kPixels)));

FLATOUT_HD uint32_t word_at(const uint8_t* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

// Weighted sums of the channels of eight pixels. No weight is negative.
struct Sums {
  Pixels channels[kChannels];

  FLATOUT_HD Sums() {
    for (Pixels& sums : channels) sums = Pixels{} + kHalf;
  }

  FLATOUT_HD void add(const uint32_t* from, uint32_t weight) {
    Pixels pixels;
    std::memcpy(&pixels, from, sizeof pixels);
    for (int64_t c = 0; c < kChannels; ++c) channels[c] += (pixels >> (8 * c) & 255) * weight;
  }

  FLATOUT_HD void round_to(uint32_t* out) const {
    Pixels pixels{};
    for (int64_t c = 0; c < kChannels; ++c) {
      const Pixels values = channels[c] >> kFraction;
      pixels |= (values > 255 ? Pixels{} + 255 : values) << (8 * c);
    }
    std::memcpy(out, &pixels, sizeof pixels);
  }
};

// Pillow's rounding: a half is added, and the result is truncated toward zero.
inline int64_t rounded_up(double value) {
  const double shifted = value + 0.5;
  return static_cast<int64_t>(shifted);
}

// Weights of the inputs that make up each output along one axis. Outputs are those of a window.
struct Axis {
  std::vector<int32_t> first, count;
  std::vector<uint32_t> weights;
  int32_t taps;
  bool is_copy;

  Axis(int64_t in, int64_t out, int64_t window_first, int64_t window_size)
      : first(window_size), count(window_size), is_copy(in == out) {
    const double scale = static_cast<double>(in) / static_cast<double>(out), width = std::max(scale, 1.0);
    taps = static_cast<int32_t>(std::ceil(width)) * 2 + 1;
    weights.resize(static_cast<std::size_t>(window_size) * taps);
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
      first[i] = static_cast<int32_t>(begin);
      count[i] = static_cast<int32_t>(end - begin);
      for (int64_t j = 0; j < end - begin; ++j) {
        const double weight = sum != 0 ? exact[j] / sum : exact[j];
        weights[i * taps + j] = static_cast<uint32_t>(rounded_up(weight * (1 << kFraction)));
      }
    }
  }

  [[nodiscard]] int64_t size() const { return static_cast<int64_t>(first.size()); }
  [[nodiscard]] int64_t end() const { return first.back() + count.back(); }
};

// What becomes of one image: a box of it is resized to a size, of which a window is the output.
struct Place {
  int64_t top, left, height, width;
  int64_t resized_height, resized_width;
  int64_t window_top, window_left;
  bool flip, vertical_first;
};

// Buffers of a thread, which all of its images use one after the other.
struct Scratch {
  std::vector<uint8_t> last_row;
  std::vector<uint32_t> rows, line, tile, resized;
};

// Rows of the box of an image. One byte after the last pixel of each row may be read too.
class Box {
 public:
  Box(const uint8_t* image, int64_t height, int64_t width, const Place& place, std::vector<uint8_t>& last_row)
      : data_(image + (place.top * width + place.left) * kChannels), stride_(width * kChannels) {
    if (place.top + place.height < height || place.left + place.width < width) return;
    last_ = place.height - 1;
    last_row.resize(place.width * kChannels + 1);
    std::memcpy(last_row.data(), data_ + last_ * stride_, place.width * kChannels);
    last_row_ = last_row.data();
  }

  FLATOUT_HD const uint8_t* row(int64_t y) const { return y == last_ ? last_row_ : data_ + y * stride_; }

 private:
  const uint8_t *data_, *last_row_ = nullptr;
  int64_t stride_, last_ = -1;
};

// Resizes eight rows. `tile` holds their pixels [column][row], from column `begin` on, and `resized` the
// result.
FLATOUT_HD void resize_tile(const Axis& axis, int64_t begin, const uint32_t* tile, uint32_t* resized) {
  const int32_t *const first = axis.first.data(), *const count = axis.count.data();
  const uint32_t* weights = axis.weights.data();
  for (int64_t x = 0, width = axis.size(); x < width; ++x, weights += axis.taps) {
    const uint32_t* from = tile + (first[x] - begin) * kPixels;
    Sums sums;
    for (int32_t j = 0; j < count[x]; ++j) sums.add(from + j * kPixels, weights[j]);
    sums.round_to(resized + x * kPixels);
  }
}

// Sets `line` to output row `y` of `rows`, the first of which is input row `begin`.
FLATOUT_HD void add_rows(const Axis& axis, int64_t y, const uint32_t* rows, int64_t begin, int64_t stride,
                         uint32_t* line) {
  const uint32_t* const weights = &axis.weights[y * axis.taps];
  const uint32_t* const from = rows + (axis.first[y] - begin) * stride;
  const int32_t count = axis.count[y];
  for (int64_t i = 0; i < stride; i += kPixels) {
    Sums sums;
    for (int32_t j = 0; j < count; ++j) sums.add(from + j * stride + i, weights[j]);
    sums.round_to(line + i);
  }
}

inline int64_t in_vectors(int64_t pixels) { return (pixels + kPixels - 1) / kPixels * kPixels; }

// Writes an output row to the planes of `out`, [C][plane], as floats that `channels` normalize.
FLATOUT_HD void write_row(const uint32_t* __restrict pixels, int64_t width, const Channel* channels,
                          float* out, int64_t plane) {
  for (int64_t c = 0; c < kChannels; ++c, out += plane) {
    const Channel channel = channels[c];
    float* __restrict to = out;
    for (int64_t x = 0; x < width; ++x)
      to[x] = normalize(static_cast<float>(static_cast<int32_t>(pixels[x] >> (8 * c) & 255)), channel);
  }
}

// Writes an output row as bytes [width][C].
FLATOUT_HD void write_row(const uint32_t* __restrict pixels, int64_t width, uint8_t* __restrict out) {
  for (int64_t x = 0; x < width; ++x)
    for (int64_t c = 0; c < kChannels; ++c)
      out[x * kChannels + c] = static_cast<uint8_t>(pixels[x] >> (8 * c));
}

// Copies `count` words between a row and every eighth word of a tile.
FLATOUT_HD void to_tile(const uint32_t* __restrict row, int64_t count, uint32_t* __restrict tile) {
  for (int64_t x = 0; x < count; ++x) tile[x * kPixels] = row[x];
}

FLATOUT_HD void from_tile(const uint32_t* __restrict tile, int64_t count, uint32_t* __restrict row) {
  for (int64_t x = 0; x < count; ++x) row[x] = tile[x * kPixels];
}

// Resizes a box, rows and columns in the order of Pillow. `out` is [C][height][width] of floats, or
// [height][width][C] of bytes.
template <class T>
struct Resample {
  const Box& box;
  const Axis &horizontal, &vertical;
  const Channel* channels;
  bool flip;
  uint32_t *rows, *line, *tile, *resized;
  T* out;

  const int64_t height = vertical.size(), width = horizontal.size();
  const int64_t left = horizontal.first[0], columns = horizontal.end() - left;
  const int64_t top = vertical.first[0], lines = vertical.end() - top;

  FLATOUT_HD void rows_first() const {
    const int64_t stride = in_vectors(width);
    for (int64_t y = 0; horizontal.is_copy && y < lines; ++y) read(y, rows + y * stride, 1);
    for (int64_t y = 0; !horizontal.is_copy && y < lines; y += kPixels) {
      const int64_t count = std::min(kPixels, lines - y);
      for (int64_t r = 0; r < count; ++r) read(y + r, tile + r, kPixels);
      resize_tile(horizontal, left, tile, resized);
      for (int64_t r = 0; r < count; ++r) from_tile(resized + r, width, rows + (y + r) * stride);
    }
    for (int64_t y = 0; y < height; ++y) {
      if (vertical.is_copy)
        std::copy_n(rows + y * stride, width, line);
      else
        add_rows(vertical, y, rows, top, stride, line);
      write(y);
    }
  }

  FLATOUT_HD void columns_first() const {
    const int64_t stride = in_vectors(columns);
    for (int64_t y = 0; y < lines; ++y) read(y, rows + y * stride, 1);
    for (int64_t y = 0; y < height; y += kPixels) {
      const int64_t count = std::min(kPixels, height - y);
      for (int64_t r = 0; r < count; ++r) {
        add_rows(vertical, y + r, rows, top, stride, line);
        to_tile(line, columns, tile + r);
      }
      resize_tile(horizontal, left, tile, resized);
      for (int64_t r = 0; r < count; ++r) {
        from_tile(resized + r, width, line);
        write(y + r);
      }
    }
  }

 private:
  // Copies the needed pixels of a line of the box to every `step`-th word.
  FLATOUT_HD void read(int64_t y, uint32_t* __restrict to, int64_t step) const {
    const uint8_t* from = box.row(top + y) + left * kChannels;
    for (int64_t x = 0, count = columns; x < count; ++x) to[x * step] = word_at(from + x * kChannels);
  }

  // Writes `line` as output row `y`.
  FLATOUT_HD void write(int64_t y) const {
    if (flip) std::reverse(line, line + width);
    if constexpr (std::is_same_v<T, float>)
      write_row(line, width, channels, out + y * width, height * width);
    else
      write_row(line, width, out + y * width * kChannels);
  }
};

// Makes one output.
template <class T>
void run_resample(const Tensor& image, const Place& place, int64_t height, int64_t width,
                  const Channel* channels, Scratch& scratch, T* out) {
  const Axis vertical(place.height, place.resized_height, place.window_top, height);
  const Axis horizontal(place.width, place.resized_width, place.window_left, width);
  const Box box(static_cast<const uint8_t*>(image.const_data_ptr()), image.size(0), image.size(1), place,
                scratch.last_row);
  const int64_t longest = in_vectors(std::max(place.width, width));
  scratch.rows.resize((vertical.end() - vertical.first[0]) * longest);
  scratch.line.resize(longest);
  scratch.tile.resize(longest * kPixels);
  scratch.resized.resize(longest * kPixels);
  const Resample<T> resample{box,
                             horizontal,
                             vertical,
                             channels,
                             place.flip,
                             scratch.rows.data(),
                             scratch.line.data(),
                             scratch.tile.data(),
                             scratch.resized.data(),
                             out};
  run_vectorized([&]() __attribute__((always_inline)) {
    place.vertical_first ? resample.columns_first() : resample.rows_first();
  });
}

void check_part(const char* name, int64_t first, int64_t size, int64_t all) {
  STD_TORCH_CHECK(first >= 0 && size > 0 && size <= all - first, name, " must be within ", all, ", got ",
                  size, " from ", first);
}

Place check_place(const Tensor& image, std::span<const int64_t> values, int64_t height, int64_t width) {
  STD_TORCH_CHECK(image.dim() == 3 && image.scalar_type() == ScalarType::Byte && image.is_contiguous() &&
                      image.size(2) == kChannels,
                  "images must be contiguous uint8 of 3 dimensions [H, W, 3], got ", image.dim(), " of ",
                  torch::headeronly::toString(image.scalar_type()));
  const Place place{values[0], values[1], values[2], values[3],      values[4],
                    values[5], values[6], values[7], values[8] != 0, values[9] != 0};
  check_part("rows of the box", place.top, place.height, image.size(0));
  check_part("columns of the box", place.left, place.width, image.size(1));
  STD_TORCH_CHECK(std::max(place.resized_height, place.resized_width) <= 1 << 20,
                  "the size must be at most 2^20");
  check_part("rows of the window", place.window_top, height, place.resized_height);
  check_part("columns of the window", place.window_left, width, place.resized_width);
  return place;
}

constexpr std::size_t kNumbers = 10;  // of a place

void resample_images(const std::vector<Tensor>& images, const std::vector<int64_t>& places,
                     const std::vector<Tensor>& out, const std::vector<double>& mean,
                     const std::vector<double>& std) {
  STD_TORCH_CHECK(out.size() == images.size() && places.size() == kNumbers * images.size(),
                  "places must hold ", kNumbers, " numbers, and out a tensor, for each of the ",
                  images.size(), " images, got ", places.size(), " and ", out.size());
  const bool is_float = !mean.empty();
  const std::vector<Channel> channels =
      is_float ? check_channels(mean, std, kChannels) : std::vector<Channel>(kChannels, Channel::of(0, 1));
  std::vector<Place> checked;
  for (std::size_t i = 0; i < images.size(); ++i) {
    STD_TORCH_CHECK(out[i].dim() == 3 && out[i].is_contiguous() &&
                        out[i].size(is_float ? 0 : 2) == kChannels &&
                        out[i].scalar_type() == (is_float ? ScalarType::Float : ScalarType::Byte),
                    "out must be contiguous float32 [3, h, w], or uint8 [h, w, 3] without mean and std");
    const int64_t first = is_float ? 1 : 0;
    checked.push_back(check_place(images[i], std::span(places).subspan(kNumbers * i, kNumbers),
                                  out[i].size(first), out[i].size(first + 1)));
  }
  const auto run = [&]<class T>(T*) {
    torch::stable::parallel_for(0, static_cast<int64_t>(images.size()), 1, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      const int64_t first = is_float ? 1 : 0;
      for (int64_t i = begin; i < end; ++i)
        run_resample(images[i], checked[i], out[i].size(first), out[i].size(first + 1), channels.data(),
                     scratch, static_cast<T*>(out[i].data_ptr()));
    });
  };
  is_float ? run(static_cast<float*>(nullptr)) : run(static_cast<uint8_t*>(nullptr));
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CPU, m) {
  m.impl("resample_images", TORCH_BOX(&flatout::resample_images));
}
