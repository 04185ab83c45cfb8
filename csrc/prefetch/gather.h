// gather.h: copies chosen rows of a table in memory side by side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flatout::prefetch {

// A tensor seen as rows: `rows` of them, `stride` bytes apart.
struct Part {
  const std::byte* data;
  std::int64_t rows;
  std::ptrdiff_t stride;
};

// Rows of `row_bytes` bytes, numbered through all parts.
struct Column {
  Column(std::vector<Part> column_parts, std::size_t bytes);

  std::vector<Part> parts;               // at least one
  std::vector<std::int64_t> first_rows;  // of each part, then the number of all rows
  std::size_t row_bytes;
};

// streamed: past the caches, which saves reading what is overwritten. (Long rows only.)
enum class Writes : std::uint8_t { cached, streamed };

// out[i] = column[indices[i]] for i in [0, count); throws std::out_of_range before it reads a row that is not
// there.
void gather_rows(const Column& column, const std::int64_t* indices, std::size_t count, std::byte* out,
                 Writes writes);

// out[i] = column[first + i] for i in [0, count).
void copy_rows(const Column& column, std::int64_t first, std::size_t count, std::byte* out);

}  // namespace flatout::prefetch
