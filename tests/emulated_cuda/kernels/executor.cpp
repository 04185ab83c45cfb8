// executor.cpp: runs kernels. Two OS threads share the blocks of a grid. The threads of a block are fibers of
// one OS thread, and run in random order from one barrier to the next.
//
// Models "Thread Hierarchy", "Synchronization Functions", "Memory Fence Functions" and "Warp Shuffle
// Functions" of the CUDA C++ Programming Guide. ThreadSanitizer sees each thread of a kernel as
// a separate fiber, so that a missing barrier or fence is a data race.
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "../runtime/runtime.h"
#include "block.h"

// Functions of the sanitizers, which are null in a process without sanitizers.
extern "C" {
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** save, const void* bottom, std::size_t size);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* save, const void** bottom, std::size_t* size);

// Saves the registers that a call preserves ("Function Calling Sequence" of the System V ABI for x86-64) on
// the stack. Then stores the stack pointer in *from, and continues on the stack `to`.
void emulated_switch(void** from, void* to);
}

asm(R"(
.text
.type emulated_switch, @function
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulated_switch, .-emulated_switch
)");

namespace emulated {
namespace {

constexpr std::size_t kStackBytes = std::size_t{128} << 10;
// Stacks begin at different cache lines. With equal cache lines, the stacks of a block would share a few sets
// of the caches, and each switch would miss.
constexpr std::size_t kColors = 61, kColorBytes = 17 * 64;
constexpr unsigned kMostThreads = 1024, kLanes = 32, kSavedRegisters = 6;
constexpr unsigned kNoSynchronization = 1;  // flag of __tsan_switch_to_fiber
constexpr int kPoison = 0xFF;

enum class State { kReady, kAtBarrier, kInWarpOperation, kDone };

struct Block;

// A stack, and the stack pointer of its suspended function.
struct Context {
  void* stack = nullptr;
  std::size_t bytes = 0;
  void* pointer = nullptr;
  void* tsan = nullptr;
  void* asan = nullptr;  // fake stack
};

void switch_to(Context& from, const Context& to) {
  if (__tsan_switch_to_fiber != nullptr) __tsan_switch_to_fiber(to.tsan, kNoSynchronization);
  if (__sanitizer_start_switch_fiber != nullptr)
    __sanitizer_start_switch_fiber(&from.asan, to.stack, to.bytes);
  emulated_switch(&from.pointer, to.pointer);
  if (__sanitizer_finish_switch_fiber != nullptr)
    __sanitizer_finish_switch_fiber(from.asan, nullptr, nullptr);
}

// Random numbers by Marsaglia, "Xorshift RNGs" (2003). A generator that divides would take longer than a
// switch of fibers.
class Random {
 public:
  explicit Random(unsigned seed) : state_(seed * 2654435769u | 1u) {}
  // Returns a number below `limit`.
  std::uint32_t below(std::size_t limit) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 17;
    state_ ^= state_ << 5;
    return static_cast<std::uint32_t>(std::uint64_t{state_} * limit >> 32);
  }

 private:
  std::uint32_t state_;
};

struct Fiber {
  Thread built_in{};
  Block* block = nullptr;
  State state = State::kDone;
  Context context;
  // The warp operation in which the thread waits. The first lane of a mask counts waiting lanes.
  WarpOperation operation{};
  unsigned argument = 0, arrived_mask = 0, arrived = 0;
  WarpOperation arrived_operation{};
  int width = 0;
  alignas(16) unsigned char sent[16], received[16];
  unsigned passed_operations = 0;  // of the warp, with this thread as the first lane
  // A second fiber for ThreadSanitizer, which does the atomic operations of this thread. The second fiber is
  // ordered only after the thread's last fence.
  void* courier = nullptr;
  char fence = 0, courier_end = 0;    // their addresses stand for synchronizations
  const void* read_atomic = nullptr;  // address of the last atomic operation

  unsigned index() const { return built_in.thread.x; }
  unsigned lane() const { return index() % kLanes; }
};

// One OS thread, which runs a block at a time.
struct Block {
  explicit Block(unsigned seed);

  std::vector<Fiber> fibers{kMostThreads};
  std::vector<Fiber*> ready;
  Fiber* current = nullptr;
  Context scheduler;
  const Job* job = nullptr;
  unsigned size = 0, live = 0, at_barrier = 0;
  int barrier_line = 0;
  Random random;
  // The addresses of these variables stand for synchronizations in ThreadSanitizer. Two barriers alternate.
  // Otherwise a thread that leaves a barrier late would be ordered after work of other threads before the
  // next barrier.
  char launch = 0, end = 0, barriers[2] = {};
  unsigned passed_barriers = 0;

  void run(const Job* job, unsigned index, dim3 blocks, dim3 threads);
  void start(Fiber& fiber);
  Fiber* take_ready();  // in random order; null if none is ready
  void pass_barrier();
  void end_thread(Fiber& fiber);
  [[noreturn]] void report_deadlock();
};

thread_local Block* block_of_thread = nullptr;

// Lock around an atomic operation and its release. ThreadSanitizer does not see the lock, so the lock adds no
// order.
std::atomic_flag atomic_lock;

void acquire(void* address) {
  if (__tsan_acquire != nullptr) __tsan_acquire(address);
}
void release(void* address) {
  if (__tsan_release != nullptr) __tsan_release(address);
}

[[noreturn]] void end_process(const char* what, const Fiber& fiber) {
  std::fprintf(stderr, "emulated CUDA: %s: block %u, thread %u of %s\n", what, fiber.built_in.block.x,
               fiber.index(), fiber.block->job->name);
  std::abort();
}

// Runs another fiber of the block, or the scheduler if none is ready.
void leave(Fiber& fiber) {
  Block& block = *fiber.block;
  if (fiber.state == State::kReady) block.ready.push_back(&fiber);
  Fiber* next = block.take_ready();
  if (next == &fiber) return;
  block.current = next;
  switch_to(fiber.context, next == nullptr ? block.scheduler : next->context);
}

// First function of every fiber, which runs one thread after another.
[[noreturn]] void serve() {
  Fiber& fiber = *block_of_thread->current;
  Block& block = *fiber.block;
  if (__sanitizer_finish_switch_fiber != nullptr) __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
  for (;;) {
    acquire(&block.launch);
    block.job->run(block.job);
    release(&block.end);
    block.end_thread(fiber);
    leave(fiber);
  }
}

Block::Block(unsigned seed) : random(seed) {
  pthread_attr_t attributes;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &scheduler.stack, &scheduler.bytes);
  pthread_attr_destroy(&attributes);
  if (__tsan_get_current_fiber != nullptr) scheduler.tsan = __tsan_get_current_fiber();
}

void Block::start(Fiber& fiber) {
  Context& context = fiber.context;
  if (context.stack != nullptr) return;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK;
  context.stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (context.stack == MAP_FAILED) end_process("no memory for a stack", fiber);
  context.bytes = kStackBytes;
  mprotect(context.stack, 4096, PROT_NONE);
  const std::size_t color = static_cast<std::size_t>(&fiber - fibers.data()) % kColors;
  char* begin = static_cast<char*>(context.stack) + kStackBytes - color * kColorBytes;
  auto** top = reinterpret_cast<void**>(begin);
  *--top = nullptr;  // at its start, a function expects a multiple of 16, plus 8
  *--top = reinterpret_cast<void*>(&serve);
  context.pointer = top - kSavedRegisters;
  if (__tsan_create_fiber != nullptr) context.tsan = __tsan_create_fiber(0);
}

Fiber* Block::take_ready() {
  if (ready.empty())
    for (unsigned i = 0; i < size; ++i)
      if (fibers[i].state == State::kReady) ready.push_back(&fibers[i]);
  if (ready.empty()) return nullptr;
  Fiber* next = std::exchange(ready[random.below(ready.size())], ready.back());
  ready.pop_back();
  return next;
}

void Block::pass_barrier() {
  at_barrier = 0;
  ++passed_barriers;
  for (unsigned i = 0; i < size; ++i)
    if (fibers[i].state == State::kAtBarrier) fibers[i].state = State::kReady;
}

// At a barrier, an exit counts as arrival.
void Block::end_thread(Fiber& fiber) {
  fiber.state = State::kDone;
  if (--live != 0 && at_barrier == live) pass_barrier();
}

void Block::report_deadlock() {
  const auto waits = [&](State state) {
    return std::find_if(fibers.begin(), fibers.end(),
                        [&](const Fiber& fiber) { return fiber.state == state; });
  };
  if (const auto lane = waits(State::kInWarpOperation); lane != fibers.end())
    end_process("deadlock: lanes that a mask names never come", *lane);
  end_process("deadlock at __syncthreads", *waits(State::kAtBarrier));
}

void Block::run(const Job* own_job, unsigned index, dim3 blocks, dim3 threads) {
  job = own_job;
  size = live = threads.x;
  at_barrier = 0;
  release(&launch);  // happens before every thread
  for (unsigned i = 0; i < size; ++i) {
    Fiber& fiber = fibers[i];
    fiber.block = this;
    fiber.built_in = {{i, 0, 0}, {index, 0, 0}, threads, blocks};
    fiber.state = State::kReady;
    fiber.arrived = 0;
    fiber.read_atomic = nullptr;
    start(fiber);
  }
  current = take_ready();
  switch_to(scheduler, current->context);
  if (live != 0) report_deadlock();
  acquire(&end);
}

// ---- the OS threads
// ------------------------------------------------------------------------------------------------

struct Range {
  std::uintptr_t address;  // within the range
  void* begin;
  std::size_t bytes;
};

int find_thread_locals(dl_phdr_info* info, std::size_t, void* data) {
  auto* range = static_cast<Range*>(data);
  if (info->dlpi_tls_data == nullptr) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    const auto begin = reinterpret_cast<std::uintptr_t>(info->dlpi_tls_data);
    if (header.p_type != PT_TLS || range->address < begin || range->address >= begin + header.p_memsz)
      continue;
    range->begin = info->dlpi_tls_data;
    range->bytes = header.p_memsz;
    return 1;
  }
  return 0;
}

// Poisons shared memory, which is undefined in a new block. These OS threads have no other thread-local
// variables in a module with kernels.
void poison_shared_memory(const Job& job) {
  Range range{reinterpret_cast<std::uintptr_t>(job.shared_memory()), nullptr, 0};
  if (dl_iterate_phdr(find_thread_locals, &range) != 0) std::memset(range.begin, kPoison, range.bytes);
}

// Pool of two OS threads, so that blocks run concurrently.
class Pool {
 public:
  static Pool& get() {
    static auto& pool = *new Pool;
    return pool;
  }

  void run(const Job* job, dim3 blocks, dim3 threads) {
    std::unique_lock lock(mutex_);
    job_ = job;
    blocks_ = blocks;
    threads_ = threads;
    order_.resize(blocks.x);
    for (unsigned i = 0; i < blocks.x; ++i) order_[i] = i;
    std::shuffle(order_.begin(), order_.end(), random_);
    next_ = 0;
    busy_ = kThreads;
    ++generation_;
    wake_.notify_all();
    idle_.wait(lock, [&] { return busy_ == 0; });
  }

 private:
  static constexpr unsigned kThreads = 2;

  Pool() : random_(Runtime::get().settings.seed) {
    for (unsigned i = 0; i < kThreads; ++i) std::thread([this, i] { work(i); }).detach();
  }

  void work(unsigned index) {
    auto& block = *new Block(Runtime::get().settings.seed * kThreads + index + 1);
    block_of_thread = &block;
    for (unsigned long seen = 0;;) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      lock.unlock();
      for (std::size_t i; (i = next_.fetch_add(1)) < order_.size();) {
        poison_shared_memory(*job_);
        block.run(job_, order_[i], blocks_, threads_);
      }
      lock.lock();
      if (--busy_ == 0) idle_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::minstd_rand random_;
  const Job* job_ = nullptr;
  dim3 blocks_, threads_;
  std::vector<unsigned> order_;
  std::atomic<std::size_t> next_{0};
  unsigned long generation_ = 0;
  unsigned busy_ = 0;
};

// Returns the lane from which a lane reads, or the lane itself if there is none.
unsigned source_lane(const Fiber& fiber, unsigned lane) {
  const auto width = static_cast<unsigned>(fiber.width);
  const unsigned segment = lane & ~(width - 1), argument = fiber.argument;
  switch (fiber.operation) {
    case WarpOperation::kShuffle:
      return segment + argument % width;
    case WarpOperation::kUp:
      return lane >= segment + argument ? lane - argument : lane;
    case WarpOperation::kDown:
      return lane + argument < segment + width ? lane + argument : lane;
    case WarpOperation::kXor:
      return (lane ^ argument) < segment + width ? lane ^ argument : lane;
    default:
      return lane;
  }
}

// Returns a bit for each lane of the mask whose predicate is true, as __ballot_sync does.
unsigned ballot(const Fiber* warp, unsigned mask) {
  unsigned voters = 0;
  for (unsigned lane = 0; lane < kLanes; ++lane)
    if ((mask >> lane & 1u) != 0 && warp[lane].sent[0] != 0) voters |= 1u << lane;
  return voters;
}

// Exchanges the values of the lanes of a mask, after all have arrived.
void exchange(Fiber* warp, unsigned mask) {
  Fiber& first = warp[std::countr_zero(mask)];
  ++first.passed_operations;
  const unsigned voters = first.operation == WarpOperation::kBallot ? ballot(warp, mask) : 0;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1u) == 0) continue;
    Fiber& fiber = warp[lane];
    const unsigned source = source_lane(fiber, lane);
    if (fiber.operation == WarpOperation::kBallot) {
      std::memcpy(fiber.received, &voters, sizeof voters);
    } else if ((mask >> source & 1u) != 0) {
      std::memcpy(fiber.received, warp[source].sent, sizeof(fiber.received));
    } else {
      std::memset(fiber.received, kPoison, sizeof(fiber.received));  // undefined on a GPU
    }
    fiber.state = State::kReady;
  }
}

}  // namespace
}  // namespace emulated

using namespace emulated;

extern "C" {

const Thread* emulated_thread() { return &block_of_thread->current->built_in; }

void emulated_syncthreads(int line) {
  Block& block = *block_of_thread;
  Fiber& fiber = *block.current;
  void* barrier = &block.barriers[block.passed_barriers % 2];
  release(barrier);
  if (block.at_barrier != 0 && block.barrier_line != line)
    end_process("threads of a block wait at different calls of __syncthreads", fiber);
  block.barrier_line = line;
  fiber.state = State::kAtBarrier;
  if (++block.at_barrier == block.live) block.pass_barrier();
  leave(fiber);
  acquire(barrier);
}

void emulated_warp(WarpOperation operation, unsigned mask, const void* in, void* out, std::size_t size,
                   unsigned argument, int width) {
  Block& block = *block_of_thread;
  Fiber& fiber = *block.current;
  const unsigned base = fiber.index() - fiber.lane(), lanes = std::min(kLanes, block.size - base);
  Fiber* warp = &block.fibers[base];
  if ((mask >> fiber.lane() & 1u) == 0)
    end_process("a lane calls a warp operation whose mask leaves it out", fiber);
  if (lanes < kLanes && mask >> lanes != 0)
    end_process("a mask names lanes that the block does not have", fiber);
  if (size > sizeof(fiber.sent)) end_process("a shuffle of more than 16 bytes", fiber);
  if (size != 0) std::memcpy(fiber.sent, in, size);
  fiber.operation = operation;
  fiber.argument = argument;
  fiber.width = width;
  fiber.state = State::kInWarpOperation;
  // "__syncwarp() guarantees memory ordering among threads participating in the barrier". Shuffles imply no
  // barrier.
  Fiber& first = warp[std::countr_zero(mask)];
  void* ordered = operation == WarpOperation::kSync ? &first.sent[first.passed_operations % 2] : nullptr;
  if (ordered != nullptr) release(ordered);
  if (first.arrived == 0) {
    first.arrived_mask = mask;
    first.arrived_operation = operation;
  }
  if (first.arrived_mask != mask || first.arrived_operation != operation)
    end_process("lanes of a warp call different warp operations", fiber);
  if (++first.arrived == static_cast<unsigned>(std::popcount(mask))) {
    first.arrived = 0;
    exchange(warp, mask);
  }
  leave(fiber);
  if (ordered != nullptr) acquire(ordered);
  if (size != 0) std::memcpy(out, fiber.received, size);
}

// "Memory Fence Functions": a thread writes, then runs a fence, then an atomic operation. Another thread
// reads the result by an atomic operation and runs a fence. Its later work is ordered after the writes.
void emulated_threadfence() {
  Fiber& fiber = *block_of_thread->current;
  release(&fiber.fence);
  if (fiber.read_atomic != nullptr) acquire(const_cast<void*>(fiber.read_atomic));
}

void emulated_atomic_begin(const void*) {
  Block& block = *block_of_thread;
  if (block.random.below(4) == 0) std::this_thread::yield();  // another block may come between
  while (atomic_lock.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  if (__tsan_switch_to_fiber == nullptr) return;
  Fiber& fiber = *block.current;
  if (fiber.courier == nullptr) {  // a new fiber is ordered after work of its creator
    __tsan_switch_to_fiber(block.scheduler.tsan, kNoSynchronization);
    fiber.courier = __tsan_create_fiber(0);
  }
  __tsan_switch_to_fiber(fiber.courier, kNoSynchronization);
  acquire(&block.launch);
  acquire(&fiber.fence);
}

// Releases the operation itself, too, because the block that counts last may reset the counter.
void emulated_atomic_end(const void* address) {
  Fiber& fiber = *block_of_thread->current;
  release(const_cast<void*>(address));
  if (__tsan_switch_to_fiber != nullptr) {
    release(&fiber.courier_end);
    __tsan_switch_to_fiber(fiber.context.tsan, kNoSynchronization);
    acquire(&fiber.courier_end);
  }
  fiber.read_atomic = address;
  atomic_lock.clear(std::memory_order_release);
}

cudaError_t emulated_launch(Job* job, dim3 blocks, dim3 threads, cudaStream_t handle) {
  std::shared_ptr<Job> kept(job, job->destroy);
  return call("cudaLaunchKernel", Needs::kContext, [&](Runtime& runtime, Lock&) {
    if (blocks.x == 0 || threads.x == 0 || threads.x > kMostThreads) return cudaErrorInvalidConfiguration;
    if (blocks.y * blocks.z * threads.y * threads.z != 1) return cudaErrorNotSupported;
    Stream* stream = runtime.stream_of(handle);
    if (stream->device != current_device()) return cudaErrorInvalidResourceHandle;
    const std::string what = std::string("kernel ") + kept->name;
    // Moved, so that the operation is the only owner. ThreadSanitizer does not see that the count of owners
    // orders the delete.
    auto run = [kept = std::move(kept), blocks, threads] { Pool::get().run(kept.get(), blocks, threads); };
    return runtime.enqueue(stream, {what, std::move(run), bit_of(stream->device)});
  });
}

cudaError_t emulated_enqueue(const char* name, void (*run)(void*), void (*destroy)(void*), void* argument,
                             cudaStream_t handle, bool all_devices) {
  const std::shared_ptr<void> kept(argument, destroy);
  return call("cudaLaunchKernel", Needs::kContext, [&](Runtime& runtime, Lock&) {
    Stream* stream = runtime.stream_of(handle);
    const unsigned devices = all_devices ? kAllDevices : bit_of(stream->device);
    const std::string what = std::string("kernel ") + name;
    return runtime.enqueue(stream, {what, [kept, run] { run(kept.get()); }, devices});
  });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  return call(__func__, Needs::kContext, [&](Runtime&, Lock&) {
    *attributes = {};
    attributes->maxThreadsPerBlock = static_cast<int>(kMostThreads);
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return cudaSuccess;
  });
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
}
