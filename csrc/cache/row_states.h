// row_states.h: one byte for each row of a table that processes share: empty, being written, or complete.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace flatout::cache {

// View of memory that the caller owns and has set to zero. Only the process that has claimed a row writes it.
// A process that finds a row complete reads all of the row, because the state is released and acquired.
class RowStates {
 public:
  RowStates(std::uint8_t* states, std::size_t rows) noexcept : states_(states), rows_(rows) {}

  // True for the first caller that claims the row. This caller must write the row.
  bool claim(std::size_t row) const {
    std::uint8_t expected = empty;
    return at(row).compare_exchange_strong(expected, claimed, std::memory_order_acq_rel,
                                           std::memory_order_relaxed);
  }

  void complete(std::size_t row) const { at(row).store(completed, std::memory_order_release); }
  void give_up(std::size_t row) const { at(row).store(empty, std::memory_order_release); }
  bool is_complete(std::size_t row) const { return at(row).load(std::memory_order_acquire) == completed; }

 private:
  static constexpr std::uint8_t empty = 0, claimed = 1, completed = 2;
  static_assert(std::atomic_ref<std::uint8_t>::is_always_lock_free);  // other processes would not see a lock

  std::atomic_ref<std::uint8_t> at(std::size_t row) const {
    if (row >= rows_) throw std::out_of_range("row out of range");
    return std::atomic_ref<std::uint8_t>(states_[row]);
  }

  std::uint8_t* states_;
  std::size_t rows_;
};

}  // namespace flatout::cache
