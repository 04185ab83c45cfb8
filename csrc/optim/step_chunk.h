// step_chunk.h: the work of one thread on one chunk in an optimizer step.
#pragma once

#include <stdexcept>

#include "optim/storage.h"

namespace flatout {

// The storage of a kernel, and its work in addition to the rule. The compiler knows the storages that are
// used most, so that their kernels need about half of the registers.
enum class Kind {
  kPlain /* all streams are Ts */,
  kWideStates /* as kPlain, with states of the compute type */,
  kRemainder /* as kWideStates, with remainders */,
  kExtended /* any storage without codes */,
  kRandom /* as kExtended, with stochastic rounding */,
  kCodes /* as kExtended, with states in 8 bits */,
  kRandomCodes /* as kRandom, with states in 8 bits */
};
template <Kind K>
inline constexpr bool kHasCodes = K == Kind::kCodes || K == Kind::kRandomCodes;
template <Kind K>
inline constexpr bool kIsFixed = K == Kind::kPlain || K == Kind::kWideStates || K == Kind::kRemainder;

// Number of streams of a kernel: weight, gradient and states, then average and 16-bit companion.
template <class Rule, Kind K>
inline constexpr int kStreamsOf = 2 + Rule::kStates + (K == Kind::kPlain || K == Kind::kWideStates ? 0 : 2);

// Returns the storage of all steps of a fixed kind.
template <class T, class Rule, Kind K>
FLATOUT_HD constexpr Storage fixed_storage() {
  static_assert(kIsFixed<K>);
  constexpr uint32_t kAll = (1u << (2 + Rule::kStates)) - 1, kStates = kAll - 3;
  const uint32_t wide = std::is_same_v<T, compute_t<T>> ? kAll : K == Kind::kPlain ? 0 : kStates;
  return {wide, false, K == Kind::kRemainder ? Low::kRemainder : Low::kNone, false};
}
// Returns the storage of a step. In a fixed kind, the result is a constant.
template <class T, class Rule, Kind K>
FLATOUT_HD Storage storage_of(const Storage& storage) {
  if constexpr (kIsFixed<K>) return fixed_storage<T, Rule, K>();
  return storage;
}

struct alignas(kVectorBytes) Bytes16 {
  uint32_t word[4];
};

// Throws at a misaligned address in host code, which emulated devices run. A GPU faults.
FLATOUT_HD void must_be_aligned([[maybe_unused]] const void* address) {
#ifndef __CUDA_ARCH__
  if (reinterpret_cast<uintptr_t>(address) % kVectorBytes != 0) throw std::logic_error("misaligned vector");
#endif
}

// With `once`, the cache evicts the bytes first, and keeps the gradients that the check has just read. Then
// the address must be in global memory.
FLATOUT_HD Bytes16 load_aligned(const void* from, int k, [[maybe_unused]] bool once) {
  must_be_aligned(from);
#ifdef __CUDA_ARCH__
  if (once) return detail::bit_cast<Bytes16>(__ldcs(static_cast<const uint4*>(from) + k));
  return static_cast<const Bytes16*>(from)[k];
#else
  Bytes16 bytes;
  memcpy(&bytes, static_cast<const char*>(from) + int64_t{k} * kVectorBytes, sizeof(bytes));
  return bytes;
#endif
}

FLATOUT_HD void store_aligned(void* to, int k, const Bytes16& bytes, [[maybe_unused]] bool once) {
  must_be_aligned(to);
#ifdef __CUDA_ARCH__
  if (once) return __stcs(static_cast<uint4*>(to) + k, detail::bit_cast<uint4>(bytes));
  static_cast<Bytes16*>(to)[k] = bytes;
#else
  memcpy(static_cast<char*>(to) + int64_t{k} * kVectorBytes, &bytes, sizeof(bytes));
#endif
}

// The bits of kWidth elements, stored as 16 bytes of Ts or as kWidth elements of the compute type. The
// elements are converted after the loads of all streams have been issued, so that the loads overlap.
template <class T>
struct VectorBits {
  using Acc = compute_t<T>;
  static constexpr int kWidth = kVectorBytes / sizeof(T);
  static constexpr int kParts = kWidth * sizeof(Acc) / kVectorBytes;
  Bytes16 part[kParts];

  template <class Element>
  FLATOUT_HD void load_as(const Element* from, bool aligned, bool once) {
    constexpr int kUsed = kWidth * sizeof(Element) / kVectorBytes;
    if (aligned) {
      for (int k = 0; k < kUsed; ++k) part[k] = load_aligned(from, k, once);
    } else {
      Element lane[kWidth];
      for (int l = 0; l < kWidth; ++l) lane[l] = from[l];
      memcpy(part, lane, sizeof(lane));
    }
  }
  template <class Element>
  FLATOUT_HD void store_as(Element* to, bool aligned, bool once) const {
    constexpr int kUsed = kWidth * sizeof(Element) / kVectorBytes;
    if (aligned) {
      for (int k = 0; k < kUsed; ++k) store_aligned(to, k, part[k], once);
    } else {
      Element lane[kWidth];
      memcpy(lane, part, sizeof(lane));
      for (int l = 0; l < kWidth; ++l) to[l] = lane[l];
    }
  }
  // The lanes as Elements. Compilers keep this copy in registers.
  template <class Element>
  struct Lanes {
    Element lane[kWidth];
  };
  template <class Element>
  FLATOUT_HD Lanes<Element> as() const {
    Lanes<Element> lanes;
    memcpy(&lanes, part, sizeof(lanes));
    return lanes;
  }
  template <class Element>
  FLATOUT_HD void set(const Lanes<Element>& lanes) {
    memcpy(part, &lanes, sizeof(lanes));
  }
};

// One thread of a block that updates one chunk. Reads every stream but a 16-bit copy, and writes every stream
// but the gradient.
template <class T, class Rule, Kind K>
struct StepThread {
  using Acc = compute_t<T>;
  static constexpr int kStreams = kStreamsOf<Rule, K>;
  static constexpr int kCore = 2 + Rule::kStates;
  static constexpr int kAverage = kCore, kLow = kCore + 1;
  static constexpr int kWidth = VectorBits<T>::kWidth;
  static constexpr int kAtOnce = kWidth < 4 ? kWidth : 4;  // lanes computed together; more cost registers
  static constexpr bool kRemainder = kStreams != kCore && std::is_same_v<T, bf16>;
  static constexpr bool kRandom = K == Kind::kRandom && std::is_same_v<T, bf16>;
  // 16-bit buckets may hold streams of the compute type as well.
  static constexpr bool kMixed = !std::is_same_v<T, Acc>;

  const Rule& rule;
  const Extras<Acc>& extras;
  char* stream[kStreams];  // at the chunk's first element; null: no such stream
  int64_t begin;           // the chunk's first element in its tensor
  uint32_t count;

  FLATOUT_HD Storage storage() const { return storage_of<T, Rule, K>(extras.storage); }
  FLATOUT_HD bool wide(int s) const { return !kMixed || storage().is_wide(s); }
  FLATOUT_HD uint32_t size_of(int s) const { return wide(s) ? sizeof(Acc) : sizeof(T); }
  template <class Element>
  FLATOUT_HD Element* at(int s, uint32_t i) const {
    return reinterpret_cast<Element*>(stream[s]) + i;
  }

  FLATOUT_HD uint32_t group_of(uint32_t i) const { return static_cast<uint32_t>((begin + i) / kGroup); }

  FLATOUT_HD void run(uint32_t thread, uint32_t threads) const {
    Split split = split_chunk(stream[0], size_of(0), kWidth, count);
    // All random bits of a vector must come from one group. Each chunk begins with a group.
    if (kRandom && split.head % kGroup != 0) split = {count, 0, count};
    uint32_t aligned = 0;
    for (int s = 0; s < kStreams; ++s)
      if ((reinterpret_cast<uintptr_t>(stream[s]) + split.head * size_of(s)) % kVectorBytes == 0)
        aligned |= 1u << s;
    constexpr uint32_t kAll = (1u << kStreams) - 1;
    const auto single = [&](uint32_t i) { update_one(i); };
    if (aligned == kAll) {
      for_each_vector<kWidth, kBatch<kStreams>>(split, thread, threads, single,
                                                [&](auto batch, uint32_t i, uint32_t stride) {
                                                  update_vectors<decltype(batch)::value>(i, stride, kAll);
                                                });
    } else {  // misaligned gradients, as in a communication bucket: lanes are loaded one by one
      for_each_vector<kWidth, 1>(split, thread, threads, single,
                                 [&](auto, uint32_t i, uint32_t) { update_vectors<1>(i, 0, aligned); });
    }
  }

 private:
  // Only a fixed kind knows that all streams are in global memory.
  FLATOUT_HD static bool once(int s) { return kIsFixed<K> && s != 1; }
  FLATOUT_HD VectorBits<T> fetch(int s, uint32_t i, uint32_t aligned) const {
    VectorBits<T> vector;
    const bool whole = (aligned >> s & 1u) != 0;
    wide(s) ? vector.load_as(at<Acc>(s, i), whole, once(s)) : vector.load_as(at<T>(s, i), whole, once(s));
    return vector;
  }
  FLATOUT_HD void put(int s, uint32_t i, uint32_t aligned, const VectorBits<T>& vector) const {
    const bool whole = (aligned >> s & 1u) != 0;
    wide(s) ? vector.store_as(at<Acc>(s, i), whole, once(s)) : vector.store_as(at<T>(s, i), whole, once(s));
  }

  template <int Batch>
  FLATOUT_HD void update_vectors(uint32_t first, uint32_t stride, uint32_t aligned) const {
    VectorBits<T> vector[Batch][kStreams];
    for (int b = 0; b < Batch; ++b)
      for (int s = 0; s < kStreams; ++s)
        vector[b][s] = is_read(s) ? fetch(s, first + b * stride, aligned) : VectorBits<T>{};
    for (int b = 0; b < Batch; ++b) {
      const uint32_t i = first + b * stride;
      Philox random[kRandom ? kCore : 1];
      if constexpr (kRandom)
        for (int s = 0; s < kCore; ++s)
          if (s != 1 && !wide(s)) random[s] = extras.random(s, group_of(i));
      for (int from = 0; from < kWidth; from += kAtOnce) {
        Acc x[kAtOnce][kCore];
        for (int s = 0; s < kCore; ++s) unpack(vector[b], s, from, x);
        for (int l = 0; l < kAtOnce; ++l) rule(x[l]);
        for (int s = 0; s < kCore; ++s)
          if (s != 1) pack(vector[b], s, from, x, random);
        if constexpr (kStreams != kCore) extend(vector[b], from, x);
      }
      for (int s = 0; s < kStreams; ++s)
        if (s != 1 && is_there(s)) put(s, i, aligned, vector[b][s]);
    }
  }

  FLATOUT_HD bool is_there(int s) const {
    if (s == kAverage) return storage().average;
    if (s == kLow) return kMixed && storage().low != Low::kNone;
    return true;
  }
  FLATOUT_HD bool is_read(int s) const {
    if (s == kLow) return kRemainder && has_remainder();
    return is_there(s);
  }
  FLATOUT_HD bool has_remainder() const { return storage().low == Low::kRemainder; }
  using Block = Acc (&)[kAtOnce][kCore];
  using ConstBlock = const Acc (&)[kAtOnce][kCore];

  FLATOUT_HD void unpack(const VectorBits<T> (&vector)[kStreams], int s, int from, Block x) const {
    if (wide(s)) {
      const auto lanes = vector[s].template as<Acc>();
      for (int l = 0; l < kAtOnce; ++l) x[l][s] = lanes.lane[from + l];
      return;
    }
    const auto lanes = vector[s].template as<T>();
    if constexpr (kRemainder) {
      if (s == 0 && has_remainder()) {
        const auto rest = vector[kLow].template as<int16_t>();
        for (int l = 0; l < kAtOnce; ++l) x[l][0] = join(lanes.lane[from + l], rest.lane[from + l]);
        return;
      }
    }
    for (int l = 0; l < kAtOnce; ++l) x[l][s] = load(lanes.lane[from + l]);
  }

  FLATOUT_HD void pack(VectorBits<T> (&vector)[kStreams], int s, int from, ConstBlock x,
                       const Philox (&random)[kRandom ? kCore : 1]) const {
    if (wide(s)) {
      auto lanes = vector[s].template as<Acc>();
      for (int l = 0; l < kAtOnce; ++l) lanes.lane[from + l] = x[l][s];
      vector[s].set(lanes);
      return;
    }
    auto lanes = vector[s].template as<T>();
    if constexpr (kRemainder) {
      if (s == 0 && has_remainder()) {
        auto rest = vector[kLow].template as<int16_t>();
        for (int l = 0; l < kAtOnce; ++l) split(x[l][0], lanes.lane[from + l], rest.lane[from + l]);
        vector[0].set(lanes);
        vector[kLow].set(rest);
        return;
      }
    }
    for (int l = 0; l < kAtOnce; ++l) {
      if constexpr (kRandom) {
        store_stochastic(lanes.lane[from + l], x[l][s], random[s].bits(from + l));
      } else {
        store(lanes.lane[from + l], x[l][s]);
      }
    }
    vector[s].set(lanes);
  }

  // Average and rounded copy of the new weights.
  FLATOUT_HD void extend(VectorBits<T> (&vector)[kStreams], int from, ConstBlock x) const {
    if (storage().average) {
      auto average = vector[kAverage].template as<Acc>();
      for (int l = 0; l < kAtOnce; ++l)
        average.lane[from + l] = extras.average(average.lane[from + l], x[l][0]);
      vector[kAverage].set(average);
    }
    if (storage().low == Low::kCopy) {
      auto copy = vector[kLow].template as<T>();
      for (int l = 0; l < kAtOnce; ++l) store(copy.lane[from + l], x[l][0]);
      vector[kLow].set(copy);
    }
  }

  FLATOUT_HD void update_one(uint32_t i) const {
    Acc x[kCore];
    for (int s = 0; s < kCore; ++s) x[s] = wide(s) ? *at<Acc>(s, i) : load(*at<T>(s, i));
    if constexpr (kRemainder)
      if (has_remainder()) x[0] = join(*at<T>(0, i), *at<int16_t>(kLow, i));
    rule(x);
    for (int s = 0; s < kCore; ++s)
      if (s != 1) store_one(s, i, x[s]);
    if constexpr (kStreams != kCore) {
      if (storage().average) {
        Acc* average = at<Acc>(kAverage, i);
        *average = extras.average(*average, x[0]);
      }
      if (storage().low == Low::kCopy) store(*at<T>(kLow, i), x[0]);
    }
  }

  FLATOUT_HD void store_one(int s, uint32_t i, Acc value) const {
    if (wide(s)) {
      *at<Acc>(s, i) = value;
      return;
    }
    if constexpr (kRemainder) {
      if (s == 0 && has_remainder()) return split(value, *at<T>(0, i), *at<int16_t>(kLow, i));
    }
    if constexpr (kRandom)
      return store_stochastic(*at<T>(s, i), value, extras.random(s, group_of(i)).bits(i % kGroup));
    store(*at<T>(s, i), value);
  }
};

}  // namespace flatout
