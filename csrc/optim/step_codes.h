// step_codes.h: the work of a warp on one block of states in 8 bits (optim/dynamic8.h). The warp decodes the
// states into staging memory, updates them there, and encodes them. Each phase is a function of the lane, so
// that the host can run lanes one after the other. All lanes must finish a phase before the next one begins.
#pragma once

#include "optim/step_chunk.h"
#include "optim/step_table.h"

namespace flatout {

template <class T, class Rule, Kind K>
struct CodesWarp {
  using Acc = compute_t<T>;
  using Thread = StepThread<T, Rule, K == Kind::kRandomCodes ? Kind::kRandom : Kind::kExtended>;
  using Staged = float[Rule::kStates][kDynamicBlock];
  static constexpr int kStates = Rule::kStates;

  const Place& place;
  const Rule& rule;
  const Storage& storage;
  Extras<Acc> extras;  // for states that are staged as floats
  Staged& staged;

  FLATOUT_HD static CodesWarp of(const Place& place, const Rule& rule, const Extras<Acc>& extras,
                                 Staged& staged) {
    CodesWarp warp{place, rule, extras.storage, extras, staged};
    warp.extras.storage.codes = false;
    warp.extras.storage.wide |= ((1u << kStates) - 1) << 2;
    return warp;
  }

  FLATOUT_HD uint32_t blocks() const { return (place.count + kDynamicBlock - 1) / kDynamicBlock; }

  FLATOUT_HD void decode(uint32_t block, uint32_t lane) const {
    // All loads come before the first store. A compiler cannot move a load before a store, so each load would
    // wait for the one before.
    Piece piece[kStates][kPieces];
    float absmax[kStates];
    FLATOUT_UNROLL
    for (int s = 0; s < kStates; ++s) {
      absmax[s] = *absmax_of(block, s);
      FLATOUT_UNROLL
      for (uint32_t k = 0; k < kPieces; ++k) piece[s][k] = load(at<uint8_t>(2 + s, block), block, lane, k);
    }
    FLATOUT_UNROLL
    for (int s = 0; s < kStates; ++s) {
      FLATOUT_UNROLL
      for (uint32_t k = 0; k < kPieces; ++k) {
        Numbers numbers;
        FLATOUT_UNROLL
        for (uint32_t l = 0; l < kPiece; ++l)
          numbers.value[l] = s == 0 ? Dynamic8<true>::decode(piece[s][k].code[l], absmax[s])
                                    : Dynamic8<false>::decode(piece[s][k].code[l], absmax[s]);
        *reinterpret_cast<Numbers*>(&staged[s][begin_of(lane, k)]) = numbers;
      }
    }
  }

  FLATOUT_HD void step(uint32_t block, uint32_t lane) const {
    Thread thread{rule, extras, {}, first(block), count(block)};
    for (int s = 0; s < Thread::kStreams; ++s)
      thread.stream[s] =
          s >= 2 && s < 2 + kStates ? reinterpret_cast<char*>(staged[s - 2]) : at<char>(s, block);
    thread.run(lane, kLanes);
  }

  // Returns the bits of the greatest magnitude among the numbers that a lane encodes.
  FLATOUT_HD uint32_t largest(uint32_t block, uint32_t lane, int s) const {
    uint32_t found = 0;
    for_each_piece(block, lane, [&](uint32_t i, uint32_t n) {
      for (uint32_t l = 0; l < n; ++l) {
        const uint32_t bits = magnitude_bits(staged[s][i + l]);
        found = bits > found ? bits : found;
      }
    });
    return found;
  }

  FLATOUT_HD void encode(uint32_t block, uint32_t lane, int s, uint32_t largest_of_all) const {
    const DynamicScale scale = DynamicScale::of(largest_of_all);
    if (lane == 0) *absmax_of(block, s) = scale.absmax;
    uint8_t* codes = at<uint8_t>(2 + s, block);
    for_each_piece(block, lane, [&](uint32_t i, uint32_t n) {
      Piece piece{};
      for (uint32_t l = 0; l < n; ++l)
        piece.code[l] = s == 0 ? Dynamic8<true>::encode(staged[s][i + l], scale.inverse)
                               : Dynamic8<false>::encode(staged[s][i + l], scale.inverse);
      if (n == kPiece && is_aligned(codes)) {
        *reinterpret_cast<Piece*>(codes + i) = piece;
      } else {
        for (uint32_t l = 0; l < n; ++l) codes[i + l] = piece.code[l];
      }
    });
  }

 private:
  // Elements that a lane handles together. Lanes access adjacent pieces of the codes and of the staged
  // numbers.
  static constexpr uint32_t kPiece = 4;
  static constexpr uint32_t kPieces = kDynamicBlock / (kLanes * kPiece);  // of a lane
  struct alignas(kPiece) Piece {
    uint8_t code[kPiece];
  };
  struct alignas(kVectorBytes) Numbers {
    float value[kPiece];
  };

  FLATOUT_HD static uint32_t begin_of(uint32_t lane, uint32_t k) { return (k * kLanes + lane) * kPiece; }
  // Elements after the block's end are 0, and their decoded values are not used.
  FLATOUT_HD Piece load(const uint8_t* codes, uint32_t block, uint32_t lane, uint32_t k) const {
    const uint32_t i = begin_of(lane, k), end = count(block);
    if (i + kPiece <= end && is_aligned(codes)) return *reinterpret_cast<const Piece*>(codes + i);
    Piece piece{};
    for (uint32_t l = 0; l < kPiece; ++l)
      if (i + l < end) piece.code[l] = codes[i + l];
    return piece;
  }

  FLATOUT_HD int64_t first(uint32_t block) const { return place.begin + int64_t{block} * kDynamicBlock; }
  FLATOUT_HD uint32_t count(uint32_t block) const {
    const uint32_t rest = place.count - block * kDynamicBlock;
    return rest < kDynamicBlock ? rest : kDynamicBlock;
  }
  template <class Element>
  FLATOUT_HD Element* at(int s, uint32_t block) const {
    return reinterpret_cast<Element*>(
        storage.template move<T>(place.tensor.address[s], s, kStates, first(block)));
  }
  FLATOUT_HD float* absmax_of(uint32_t block, int s) const { return at<float>(4 + kStates + s, block); }
  FLATOUT_HD static bool is_aligned(const uint8_t* codes) {
    return reinterpret_cast<uintptr_t>(codes) % kPiece == 0;
  }

  // Calls body(first element, number of elements) for a lane's share of a block.
  template <class Body>
  FLATOUT_HD void for_each_piece(uint32_t block, uint32_t lane, const Body& body) const {
    const uint32_t end = count(block);
    FLATOUT_UNROLL
    for (uint32_t k = 0; k < kPieces; ++k) {
      const uint32_t i = begin_of(lane, k);
      if (end == kDynamicBlock) {
        body(i, kPiece);
      } else if (i < end) {
        body(i, end - i < kPiece ? end - i : kPiece);
      }
    }
  }
};

}  // namespace flatout
