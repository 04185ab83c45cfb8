// gather.h: copies of chosen rows of a table into adjacent memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flatout::prefetch {

// A tensor as `rows` rows that are `stride` bytes apart.
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

// Writes of long rows. Streamed writes bypass the caches, so that the CPU does not read the memory that it
// overwrites.
enum class Writes : std::uint8_t { cached, streamed };

// Sets out[i] = column[indices[i]] for i in [0, count). Throws std::out_of_range before it reads a row that
// does not exist.
void gather_rows(const Column& column, const std::int64_t* indices, std::size_t count, std::byte* out,
                 Writes writes);

// Sets out[i] = column[first + i] for i in [0, count).
void copy_rows(const Column& column, std::int64_t first, std::size_t count, std::byte* out);

}  // namespace flatout::prefetch
