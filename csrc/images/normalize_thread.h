// normalize_thread.h: the work of one thread of the CUDA kernels that normalize images.
#pragma once

#include "images/normalize.h"

namespace flatout {

// Bytes of the input in registers, stored as words. A GPU extracts a byte from a word with one instruction.
template <int Count>
struct alignas(Count) Bytes {
  static_assert(Count % 4 == 0);
  uint32_t word[Count / 4];

  FLATOUT_HD void set(int i, uint8_t byte) {
    const uint32_t shift = i % 4 * 8;
    word[i / 4] = (word[i / 4] & ~(0xFFu << shift)) | static_cast<uint32_t>(byte) << shift;
  }

  FLATOUT_HD float get(int i) const {
#ifdef __CUDA_ARCH__
    // Inserts the byte as the low byte of 2^23. A conversion from an integer would have an eighth of the
    // throughput.
    return __uint_as_float(__byte_perm(word[i / 4], 0x4B000000u, 0x7440u | (i % 4))) - 0x1.0p23f;
#else
    return static_cast<float>(word[i / 4] >> i % 4 * 8 & 0xFFu);
#endif
  }
};

// Returns the 32 bits of two words that begin at bit `shift`.
FLATOUT_HD uint32_t funnel(uint32_t low, uint32_t high, uint32_t shift) {
#ifdef __CUDA_ARCH__
  return __funnelshift_r(low, high, shift);
#else
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> shift);
#endif
}

// Loads Count bytes from any address. Reads only memory between `begin` and `end`.
template <int Count>
FLATOUT_HD Bytes<Count> load_bytes(const uint8_t* from, const uint8_t* begin, const uint8_t* end) {
  Bytes<Count> bytes{};
  const auto skew = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 4);
  if (from - begin >= skew && end - from >= Count + 4 - skew) {
    const auto* word = reinterpret_cast<const uint32_t*>(from - skew);
    uint32_t low = word[0];
    FLATOUT_UNROLL
    for (int w = 0; w < Count / 4; ++w) {
      const uint32_t high = word[w + 1];
      bytes.word[w] = funnel(low, high, static_cast<uint32_t>(skew) * 8);
      low = high;
    }
  } else {
    FLATOUT_UNROLL
    for (int i = 0; i < Count; ++i) bytes.set(i, from[i]);
  }
  return bytes;
}

// Divisor for many divisions. Each division is a multiplication and a shift (Granlund and Montgomery,
// "Division by invariant integers using multiplication", 1994).
class Divisor {
 public:
  static constexpr int64_t kLimit = int64_t{1} << 31;  // dividend and divisor must be smaller

  explicit Divisor(uint32_t divisor) {
    while (uint64_t{1} << shift_ < divisor) ++shift_;
    factor_ = static_cast<uint32_t>((((uint64_t{1} << shift_) - divisor) << 32) / divisor + 1);
  }

  FLATOUT_HD uint32_t quotient(uint32_t number) const {
#ifdef __CUDA_ARCH__
    const uint32_t product = __umulhi(number, factor_);
#else
    const auto product = static_cast<uint32_t>(uint64_t{number} * factor_ >> 32);
#endif
    return (product + number) >> shift_;
  }

 private:
  uint32_t shift_ = 0, factor_;
};

// Stores two floats. On a GPU, one instruction rounds both to 16 bits.
template <class T>
FLATOUT_HD void store_pair(T* to, float first, float second) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, bf16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    to[0].bits = __bfloat16_as_ushort(pair.x);
    to[1].bits = __bfloat16_as_ushort(pair.y);
    return;
  } else if constexpr (std::is_same_v<T, f16>) {
    const __half2 pair = __floats2half2_rn(first, second);
    to[0].bits = __half_as_ushort(pair.x);
    to[1].bits = __half_as_ushort(pair.y);
    return;
  }
#endif
  store(to[0], first);
  store(to[1], second);
}

// Stores a pack of the output, which begins at a 16-byte boundary. The last pack may be incomplete.
template <class T>
FLATOUT_HD void store_pack(const ImageBatch& batch, int64_t pack, const Pack<T>& values) {
  constexpr int kWidth = Pack<T>::kWidth;
  T* to = static_cast<T*>(batch.out) + pack * kWidth;
  const int64_t left = batch.elements() - pack * kWidth;
  if (left >= kWidth) {
    *reinterpret_cast<Pack<T>*>(to) = values;
  } else {
    FLATOUT_UNROLL
    for (int i = 0; i < kWidth; ++i)
      if (i < left) to[i] = values.lane[i];
  }
}

// The work of a thread for few channels. A thread has a group of as many pixels as a pack has elements, in
// all channels. C rows of the input become C packs of the output. In interleaved output, the packs of one
// lane are adjacent, and those of the next lane begin C packs later. So the lanes of a warp exchange packs
// through shared memory (`stage`, 32 C packs). Then adjacent lanes store adjacent packs. Indices have 32 bits
// and need no division, to save instructions. With 14 instructions per 16-bit element, an SM that keeps up
// with an H200's memory issues three quarters of its maximum.
template <class T, int C, Order In, Order Out>
struct GroupThread {
  static constexpr uint32_t kWidth = Pack<T>::kWidth;
  static constexpr bool kStaged = Out == Order::kInterleaved && C > 1;
  using Row = Bytes<kWidth>;

  ImageBatch batch;
  uint32_t pixels, all_pixels;  // of an image, of the batch
  Divisor by_pixels;

  explicit GroupThread(const ImageBatch& images)
      : batch(images),
        pixels(static_cast<uint32_t>(images.pixels)),
        all_pixels(static_cast<uint32_t>(images.images * images.pixels)),
        by_pixels(pixels) {}

  // Groups of planar output have to be whole and aligned.
  static bool fits(const ImageBatch& images) {
    return images.channels == C && images.images * images.pixels < Divisor::kLimit &&
           (Out == Order::kInterleaved || images.pixels % kWidth == 0);
  }

  uint32_t groups() const { return (all_pixels + kWidth - 1) / kWidth; }

  // Computes the lane's own group, before the __syncwarp. Writes the group to the stage if there is one.
  FLATOUT_HD void compute(const Channel (&channels)[C], uint32_t group, uint32_t lane, Pack<T>* stage) const {
    const uint32_t pixel = group * kWidth;
    if (pixel >= all_pixels) return;
    const uint32_t image = In == Order::kPlanar || Out == Order::kPlanar ? by_pixels.quotient(pixel) : 0;
    const uint32_t place = pixel - image * pixels;
    Row rows[C];
    load(pixel, image, place, rows);
    FLATOUT_UNROLL
    for (int k = 0; k < C; ++k) {
      Pack<T> pack;
      FLATOUT_UNROLL
      for (uint32_t i = 0; i < kWidth; i += 2)
        store_pair(&pack.lane[i], value(rows, channels, k, i), value(rows, channels, k, i + 1));
      if constexpr (kStaged) {
        stage[slot(lane * C + k)] = pack;
      } else if constexpr (Out == Order::kInterleaved) {
        store_pack(batch, group, pack);
      } else {
        T* plane = static_cast<T*>(batch.out) + (int64_t{image} * C + k) * pixels;
        *reinterpret_cast<Pack<T>*>(plane + place) = pack;
      }
    }
  }

  // Stores adjacent packs in adjacent lanes, after the __syncwarp. `first_group` is the group of lane 0.
  FLATOUT_HD void store_staged(uint32_t first_group, uint32_t lane, const Pack<T>* stage) const {
    if constexpr (kStaged) {
      const int64_t first = int64_t{first_group} * C + lane;
      const auto staged = [&](uint32_t k) { return stage[slot(k * kLanes + lane)]; };
      if ((first_group + kLanes) * kWidth <= all_pixels) {
        FLATOUT_UNROLL
        for (uint32_t k = 0; k < C; ++k)
          static_cast<Pack<T>*>(batch.out)[first + int64_t{k} * kLanes] = staged(k);
      } else {
        for (uint32_t k = 0; k < C; ++k) store_pack(batch, first + int64_t{k} * kLanes, staged(k));
      }
    }
  }

 private:
  // Returns the place of a pack in the stage. Shared memory serves eight lanes at a time, which must use
  // different banks. If C is odd, the eight lanes do. If C is even, each group of eight packs has a different
  // permutation.
  FLATOUT_HD static uint32_t slot(uint32_t pack) { return C % 2 != 0 ? pack : pack ^ (pack / 8 % 8); }

  // Returns element `i` of pack `k`.
  FLATOUT_HD static float value(const Row (&rows)[C], const Channel (&channels)[C], int k, int i) {
    const int element = k * kWidth + i;  // of the group, in the order of the output
    const int channel = Out == Order::kInterleaved ? element % C : k;
    const int pixel = Out == Order::kInterleaved ? element / C : i;
    const int byte = In == Order::kInterleaved ? pixel * C + channel : channel * kWidth + pixel;
    return normalize(rows[byte / kWidth].get(byte % kWidth), channels[channel]);
  }

  FLATOUT_HD void load(uint32_t pixel, uint32_t image, uint32_t place, Row (&rows)[C]) const {
    constexpr bool kPlanar = In == Order::kPlanar;
    const uint8_t* first = batch.in + (kPlanar ? int64_t{image} * C * pixels + place : int64_t{pixel} * C);
    const uint32_t step = kPlanar ? pixels : kWidth;
    if (kPlanar ? place + kWidth <= pixels : pixel + kWidth <= all_pixels) {
      // Alignment is tested once for all rows, so that the loads of all rows overlap.
      if ((reinterpret_cast<uintptr_t>(first) | step) % kWidth == 0) {
        FLATOUT_UNROLL
        for (int k = 0; k < C; ++k) rows[k] = *reinterpret_cast<const Row*>(first + int64_t{step} * k);
      } else {
        FLATOUT_UNROLL
        for (int k = 0; k < C; ++k)
          rows[k] = load_bytes<kWidth>(first + int64_t{step} * k, batch.in, batch.in + batch.elements());
      }
      return;
    }
    // The group crosses into the next image, or is cut short by the end of the batch.
    const uint32_t count = all_pixels - pixel < kWidth ? all_pixels - pixel : kWidth;
    FLATOUT_UNROLL
    for (int k = 0; k < C; ++k) rows[k] = Row{};
    if constexpr (kPlanar) {
      FLATOUT_UNROLL
      for (uint32_t i = 0; i < kWidth; ++i) {
        if (i == count) break;
        FLATOUT_UNROLL
        for (int k = 0; k < C; ++k) rows[k].set(i, batch.in[(int64_t{image} * C + k) * pixels + place]);
        if (++place == pixels) {
          ++image;
          place = 0;
        }
      }
    } else {
      FLATOUT_UNROLL
      for (uint32_t i = 0; i < C * kWidth; ++i)
        if (i < count * C) rows[i / kWidth].set(i % kWidth, first[i]);
    }
  }
};

// Computes one pack of the output, for any number of channels and any sizes.
template <class T>
FLATOUT_HD void normalize_pack(const ImageBatch& batch, const Channel* channels, int64_t pack) {
  constexpr int kWidth = Pack<T>::kWidth;
  const int64_t first = pack * kWidth, left = batch.elements() - first;
  if (left <= 0) return;
  // In the output, `inner` varies fastest, then `outer`, then the image. For planar output, `inner` is the
  // pixel and `outer` is the channel. For interleaved output, `inner` is the channel and `outer` is the
  // pixel. In the input, neighbors are `inner_step` or `outer_step` elements apart.
  const bool planar = batch.out_order == Order::kPlanar;
  const int64_t inner_size = planar ? batch.pixels : batch.channels;
  const int64_t outer_size = planar ? batch.channels : batch.pixels;
  const bool same = batch.in_order == batch.out_order;
  const int64_t inner_step = same ? 1 : outer_size, outer_step = same ? inner_size : 1;
  const int64_t row = first / inner_size;
  int64_t image = row / outer_size, outer = row - image * outer_size, inner = first - row * inner_size;
  const int64_t image_size = inner_size * outer_size;
  Pack<T> values{};
  FLATOUT_UNROLL
  for (int i = 0; i < kWidth; ++i) {
    if (i < left) {
      const uint8_t byte = batch.in[image * image_size + outer * outer_step + inner * inner_step];
      store(values.lane[i], normalize(static_cast<float>(byte), channels[planar ? outer : inner]));
      if (++inner == inner_size) {
        inner = 0;
        if (++outer == outer_size) {
          outer = 0;
          ++image;
        }
      }
    }
  }
  store_pack(batch, pack, values);
}

}  // namespace flatout
