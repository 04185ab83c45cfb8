// gather.cpp: row gathers, with the next rows prefetched while one is copied.
#include "prefetch/gather.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace flatout::prefetch {
namespace {

// Rows ahead of the one that is copied: at ~5 ns per small row this covers a DRAM access.
constexpr std::size_t rows_ahead = 16;
constexpr std::size_t cache_line = 64;
// Beyond the first lines of a long row the hardware's own prefetcher has caught on.
constexpr std::size_t lines_ahead = 4;

[[noreturn]] void out_of_range(std::int64_t index, std::int64_t rows) {
  throw std::out_of_range("index " + std::to_string(index) + " is out of range for a tensor of " +
                          std::to_string(rows) + " rows");
}

// A row size known to the compiler turns each memcpy into a few moves; 0 stands for any size.
template <std::size_t fixed_bytes>
void gather(const Column& column, const std::int64_t* indices, std::size_t count, std::byte* out) {
  const std::size_t row_bytes = fixed_bytes != 0 ? fixed_bytes : column.row_bytes;
  const std::size_t prefetched = std::min(row_bytes, lines_ahead * cache_line);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + rows_ahead < count) {
      // A prefetch of a wrong address is harmless, so the index is checked only where it is used.
      const std::byte* next = column.data + indices[i + rows_ahead] * column.row_stride;
      for (std::size_t byte = 0; byte < prefetched; byte += cache_line) __builtin_prefetch(next + byte);
    }
    const std::int64_t index = indices[i];
    if (index < 0 || index >= column.rows) out_of_range(index, column.rows);
    std::memcpy(out + i * row_bytes, column.data + index * column.row_stride, row_bytes);
  }
}

}  // namespace

void gather_rows(const Column& column, const std::int64_t* indices, std::size_t count, std::byte* out) {
  switch (column.row_bytes) {
    case 1:
      return gather<1>(column, indices, count, out);
    case 2:
      return gather<2>(column, indices, count, out);
    case 4:
      return gather<4>(column, indices, count, out);
    case 8:
      return gather<8>(column, indices, count, out);
    case 16:
      return gather<16>(column, indices, count, out);
    case 128:
      return gather<128>(column, indices, count, out);
    default:
      return gather<0>(column, indices, count, out);
  }
}

void copy_rows(const Column& column, std::int64_t first, std::size_t count, std::byte* out) {
  const auto end = first + static_cast<std::int64_t>(count);
  if (first < 0 || end > column.rows) out_of_range(first < 0 ? first : end - 1, column.rows);
  const std::byte* from = column.data + first * column.row_stride;
  if (column.row_stride == static_cast<std::ptrdiff_t>(column.row_bytes)) {
    std::memcpy(out, from, count * column.row_bytes);
    return;
  }
  for (std::size_t i = 0; i < count; ++i, from += column.row_stride) {
    std::memcpy(out + i * column.row_bytes, from, column.row_bytes);
  }
}

}  // namespace flatout::prefetch
