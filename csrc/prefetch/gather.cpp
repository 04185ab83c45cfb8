// gather.cpp: row gathers, with the next rows prefetched while one is copied.
#include "prefetch/gather.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace flatout::prefetch {
namespace {

// Distance from the copied row to the prefetched row. Copying so many small rows takes longer than a DRAM
// access.
constexpr std::size_t rows_ahead = 16;
constexpr std::size_t cache_line = 64;
// Smallest size of a long row in bytes. While a long row is copied, the next row is prefetched line by line.
constexpr std::size_t long_row = 512;

[[noreturn]] void out_of_range(std::int64_t index, std::int64_t rows) {
  throw std::out_of_range("index " + std::to_string(index) + " is out of range for " + std::to_string(rows) +
                          " rows");
}

void prefetch(const std::byte* row, std::size_t bytes) {
  for (std::size_t byte = 0; byte < bytes; byte += cache_line) __builtin_prefetch(row + byte);
}

// A row size that the compiler knows turns each memcpy into a few moves. 0 means any size.
template <std::size_t fixed_bytes>
void gather_short(const Column& column, const std::int64_t* indices, std::size_t count, std::byte* out) {
  const Part& part = column.parts.front();
  const std::size_t row_bytes = fixed_bytes != 0 ? fixed_bytes : column.row_bytes;
  for (std::size_t i = 0; i < count; ++i) {
    // A prefetch of a wrong address is harmless, so the index is checked only where it is used.
    if (i + rows_ahead < count) prefetch(part.data + indices[i + rows_ahead] * part.stride, row_bytes);
    const std::int64_t index = indices[i];
    if (index < 0 || index >= part.rows) out_of_range(index, part.rows);
    std::memcpy(out + i * row_bytes, part.data + index * part.stride, row_bytes);
  }
}

std::vector<const std::byte*> locate(const Column& column, const std::int64_t* indices, std::size_t count) {
  const std::vector<std::int64_t>& first = column.first_rows;
  std::vector<const std::byte*> rows(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (indices[i] < 0 || indices[i] >= first.back()) out_of_range(indices[i], first.back());
    const auto next = std::upper_bound(first.begin(), first.end(), indices[i]);
    const Part& part = column.parts[static_cast<std::size_t>(next - first.begin()) - 1];
    rows[i] = part.data + (indices[i] - *(next - 1)) * part.stride;
  }
  return rows;
}

void gather_located(const std::vector<const std::byte*>& rows, std::size_t row_bytes, std::byte* out) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + rows_ahead < rows.size()) prefetch(rows[i + rows_ahead], row_bytes);
    std::memcpy(out + i * row_bytes, rows[i], row_bytes);
  }
}

struct Cached {
  static void copy_line(std::byte* to, const std::byte* from) { std::memcpy(to, from, cache_line); }
  static void finish() {}
};

#ifdef __SSE2__
// Requires that `to` is aligned to 16 bytes.
struct Streamed {
  static void copy_line(std::byte* to, const std::byte* from) {
    for (std::size_t byte = 0; byte < cache_line; byte += sizeof(__m128i))
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + byte),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + byte)));
  }
  static void finish() { _mm_sfence(); }  // locks do not order such stores
};
#else
using Streamed = Cached;
#endif

template <class Writes>
void gather_long(const std::vector<const std::byte*>& rows, std::size_t row_bytes, std::byte* out) {
  const std::size_t lines_end = row_bytes / cache_line * cache_line;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::byte *from = rows[i], *next = rows[i + 1 < rows.size() ? i + 1 : i];
    std::byte* to = out + i * row_bytes;
    for (std::size_t byte = 0; byte < lines_end; byte += cache_line) {
      __builtin_prefetch(next + byte);
      Writes::copy_line(to + byte, from + byte);
    }
    std::memcpy(to + lines_end, from + lines_end, row_bytes - lines_end);
  }
  Writes::finish();
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

Column::Column(std::vector<Part> column_parts, std::size_t bytes)
    : parts(std::move(column_parts)), first_rows{0}, row_bytes(bytes) {
  for (const Part& part : parts) first_rows.push_back(first_rows.back() + part.rows);
}

void gather_rows(const Column& column, const std::int64_t* indices, std::size_t count, std::byte* out,
                 Writes writes) {
  const std::size_t row_bytes = column.row_bytes;
  if (row_bytes >= long_row || column.parts.size() > 1) {
    const std::vector<const std::byte*> rows = locate(column, indices, count);
    if (row_bytes < long_row) return gather_located(rows, row_bytes, out);
    const bool aligned = (reinterpret_cast<std::uintptr_t>(out) | row_bytes) % 16 == 0;
    if (aligned && writes == Writes::streamed) return gather_long<Streamed>(rows, row_bytes, out);
    return gather_long<Cached>(rows, row_bytes, out);
  }
  switch (row_bytes) {
    case 1:
      return gather_short<1>(column, indices, count, out);
    case 2:
      return gather_short<2>(column, indices, count, out);
    case 4:
      return gather_short<4>(column, indices, count, out);
    case 8:
      return gather_short<8>(column, indices, count, out);
    case 16:
      return gather_short<16>(column, indices, count, out);
    case 128:
      return gather_short<128>(column, indices, count, out);
    default:
      return gather_short<0>(column, indices, count, out);
  }
}

void copy_rows(const Column& column, std::int64_t first, std::size_t count, std::byte* out) {
  const std::int64_t end = first + static_cast<std::int64_t>(count), rows = column.first_rows.back();
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
