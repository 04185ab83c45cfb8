// prefetch_stress.cpp: many threads over one ring and several stagers, for ThreadSanitizer (tools/tsan.sh).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "prefetch/stager.h"

namespace {

using namespace flatout::prefetch;  // a program, not a header

void require(bool condition, const char* what) {
  if (!condition) {
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
  }
}

// Copies a table through the ring: a large one in pieces.
void copy(Stager& stager, const std::vector<std::int64_t>& table) {
  std::vector<std::int64_t> to(table.size());
  const auto* from = reinterpret_cast<const std::byte*>(table.data());
  auto copied = stager.copy({{from, reinterpret_cast<std::byte*>(to.data()), table.size() * 8}},
                            PinnedSources::staged, 0, 0);
  copied->ticket->wait();
  require(to == table, "copied table");
}

// One consumer: gathers random rows through its own stager, holds some batches, drops others on another
// thread.
void consume(const std::shared_ptr<Ring>& ring, const std::vector<std::int64_t>& table,
             const std::vector<std::int64_t>& large, int rounds, unsigned seed) {
  const std::int64_t rows = static_cast<std::int64_t>(table.size()) / 8;
  const auto* bytes = reinterpret_cast<const std::byte*>(table.data());
  const auto columns = std::make_shared<const std::vector<Column>>(std::vector<Column>{
      {{{bytes, rows, 32}}, 32},
      {{{bytes, 10, 32}, {bytes + 320, rows - 10, 32}}, 8},
      {{{bytes, rows, 32}}, 4000},  // rows over each other, and long: a batch has several parts
  });
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::int64_t> indices(64);
    for (auto& index : indices) index = static_cast<std::int64_t>(random() % static_cast<unsigned>(rows));
    Stager stager(ring, 1 + static_cast<int>(random() % 3), host_device, 2, static_cast<int>(random() % 3));
    std::vector<std::shared_ptr<Gathered>> pending;
    for (int batch = 0; batch < 8; ++batch)  // every other one of consecutive rows
      pending.push_back(stager.gather(columns, batch % 2 == 0 ? indices.data() : nullptr, 10 * batch, 64));
    std::vector<Slot> held;
    for (int batch = 0; batch < 4; ++batch) {  // the other half is dropped under way
      stager.wait(*pending[batch]);
      const auto* wide = reinterpret_cast<const std::int64_t*>(pending[batch]->slots[0]->data());
      const auto* longest = reinterpret_cast<const std::int64_t*>(pending[batch]->slots[2]->data());
      for (std::size_t i = 0; i < 64; ++i) {
        const std::int64_t row = batch % 2 == 0 ? indices[i] : 10 * batch + static_cast<std::int64_t>(i);
        require(wide[4 * i] == 4 * row, "gathered row");
        require(longest[500 * i] == 4 * row && longest[500 * i + 499] == 4 * row + 499, "gathered long row");
      }
      held.push_back(pending[batch]->slots[1]);
    }
    std::thread([slots = std::move(held)]() mutable { slots.clear(); }).join();

    copy(stager, table);
    if (round % 25 == 0) copy(stager, large);

    std::vector<std::int64_t> bad = indices;  // others are still being gathered
    bad[random() % 64] = rows;
    auto failing = stager.gather(columns, bad.data(), 0, 64);
    bool thrown = false;
    try {
      stager.wait(*failing);
    } catch (const std::out_of_range&) {
      thrown = true;
    }
    require(thrown, "out_of_range");
    if (round % 4 == 0) {  // somebody closes while others wait
      std::vector<std::shared_ptr<Gathered>> wanted(3);
      for (auto& batch : wanted) batch = stager.gather(columns, indices.data(), 0, 64);
      std::vector<std::thread> waiters;
      for (const auto& batch : wanted) {
        waiters.emplace_back([&stager, batch] {
          try {
            stager.wait(*batch);
          } catch (const std::runtime_error&) {
            // closed: not all of it had begun
          }
        });
      }
      stager.close();
      for (auto& index : indices) index = 0;  // nobody reads them any more
      for (const auto& batch : wanted)
        require(batch->ticket->done(), "every ticket of a closed stager is done");
      for (auto& waiter : waiters) waiter.join();
    }
    if (round % 2 == 0) stager.close();
    if (round % 16 == 0) ring->clear();
  }
}

// Rows of a few cache lines and something.
void gather_long_rows(std::size_t row_bytes, Writes writes) {
  const std::size_t rows = 300, count = 500;
  std::vector<std::byte> table(rows * row_bytes);
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::byte>(i * 2654435761U >> 24);
  std::vector<std::int64_t> indices(count);
  for (std::size_t i = 0; i < count; ++i) indices[i] = static_cast<std::int64_t>(i * 7919 % rows);
  const Slot slot = std::make_shared<Ring>(host_device, 1)->acquire(count * row_bytes);
  gather_rows(
      {{{table.data(), static_cast<std::int64_t>(rows), static_cast<std::ptrdiff_t>(row_bytes)}}, row_bytes},
      indices.data(), count, slot->data(), writes);
  for (std::size_t i = 0; i < count; ++i)
    require(std::equal(slot->data() + i * row_bytes, slot->data() + (i + 1) * row_bytes,
                       table.data() + static_cast<std::size_t>(indices[i]) * row_bytes),
            "long row");
}

}  // namespace

int main() {
  for (const std::size_t row_bytes : {512, 520, 529, 30000}) {
    gather_long_rows(row_bytes, Writes::cached);
    gather_long_rows(row_bytes, Writes::streamed);
  }
  std::vector<std::int64_t> table(8 * 1000);
  std::iota(table.begin(), table.end(), 0);
  std::vector<std::int64_t> large((std::size_t{9} << 20) / 8 + 3);  // three pieces
  std::iota(large.begin(), large.end(), 0);
  const auto ring = std::make_shared<Ring>(host_device, 6);
  std::vector<std::thread> consumers;
  for (unsigned seed = 0; seed < 4; ++seed) {
    consumers.emplace_back([&, seed] { consume(ring, table, large, 100, seed); });
  }
  for (auto& consumer : consumers) consumer.join();
  require(ring->idle() <= 6, "ring bound");
  std::puts("ok");
}
