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
  throw std::out_of_range("index " + std::to_string(index) + " is out of range for " + std::to_string(rows) +
                          " rows");
}

void prefetch(const std::byte* row, std::size_t bytes) {
  for (std::size_t byte = 0; byte < bytes; byte += cache_line) __builtin_prefetch(row + byte);
}

// A row size known to the compiler turns each memcpy into a few moves; 0 stands for any size.
template <std::size_t fixed_bytes>
void gather(const Column& column, const std::int64_t* indices, std::size_t count, std::byte* out) {
  const Part& part = column.parts.front();
  const std::size_t row_bytes = fixed_bytes != 0 ? fixed_bytes : column.row_bytes;
  const std::size_t prefetched = std::min(row_bytes, lines_ahead * cache_line);
  for (std::size_t i = 0; i < count; ++i) {
    // A prefetch of a wrong address is harmless, so the index is checked only where it is used.
    if (i + rows_ahead < count) prefetch(part.data + indices[i + rows_ahead] * part.stride, prefetched);
    const std::int64_t index = indices[i];
    if (index < 0 || index >= part.rows) out_of_range(index, part.rows);
    std::memcpy(out + i * row_bytes, part.data + index * part.stride, row_bytes);
  }
}

// The first row of each part; behind them the number of all rows.
std::vector<std::int64_t> first_rows(const Column& column) {
  std::vector<std::int64_t> first{0};
  for (const Part& part : column.parts) first.push_back(first.back() + part.rows);
  return first;
}

void gather_from_parts(const Column& column, const std::int64_t* indices, std::size_t count, std::byte* out) {
  const std::vector<std::int64_t> first = first_rows(column);
  std::vector<const std::byte*> rows(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (indices[i] < 0 || indices[i] >= first.back()) out_of_range(indices[i], first.back());
    const auto behind = std::upper_bound(first.begin(), first.end(), indices[i]);
    const Part& part = column.parts[static_cast<std::size_t>(behind - first.begin()) - 1];
    rows[i] = part.data + (indices[i] - *(behind - 1)) * part.stride;
  }
  const std::size_t prefetched = std::min(column.row_bytes, lines_ahead * cache_line);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + rows_ahead < count) prefetch(rows[i + rows_ahead], prefetched);
    std::memcpy(out + i * column.row_bytes, rows[i], column.row_bytes);
  }
}

void copy_from(const Part& part, std::size_t row_bytes, std::int64_t first, std::int64_t count,
               std::byte* out) {
  const std::byte* from = part.data + first * part.stride;
  const auto rows = static_cast<std::size_t>(count);
  if (part.stride == static_cast<std::ptrdiff_t>(row_bytes)) {
    std::memcpy(out, from, rows * row_bytes);
    return;
  }
  for (std::size_t i = 0; i < rows; ++i, from += part.stride)
    std::memcpy(out + i * row_bytes, from, row_bytes);
}

}  // namespace

void gather_rows(const Column& column, const std::int64_t* indices, std::size_t count, std::byte* out) {
  if (column.parts.size() > 1) return gather_from_parts(column, indices, count, out);
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
  const std::int64_t end = first + static_cast<std::int64_t>(count), rows = first_rows(column).back();
  if (first < 0 || end > rows) out_of_range(first < 0 ? first : end - 1, rows);
  std::int64_t begin = 0;  // of the part
  for (const Part& part : column.parts) {
    const std::int64_t from = std::max(first, begin), to = std::min(end, begin + part.rows);
    if (from < to) {
      copy_from(part, column.row_bytes, from - begin, to - from, out);
      out += static_cast<std::size_t>(to - from) * column.row_bytes;
    }
    begin += part.rows;
  }
}

}  // namespace flatout::prefetch
