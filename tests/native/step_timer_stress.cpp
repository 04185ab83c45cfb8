// step_timer_stress.cpp: the step timer over a clock whose instants become known late, out of order or not at
// all, and whose calls fail, under random sequences of calls and under many threads (tools/tsan.sh).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "mfu/clock_timer.h"

namespace {

using namespace flatout::mfu;  // a program, not a header

constexpr std::size_t kStreams = 3;

void require(bool condition, const char* what) {
  if (!condition) {
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
  }
}

// What the clock of a test does, and what it has seen.
struct World {
  std::mt19937 random;
  double now = 0;                         // of the host
  std::array<double, kStreams> queued{};  // when each stream will have done what is queued
  double reached = 1e300;                 // the device is there
  bool recording = false, fails = false;  // `fails`: every 8th call throws
  std::vector<double> moments;            // by instant
  std::vector<int> spare;
  std::set<int> live;

  explicit World(unsigned seed) : random(seed) {}
  unsigned draw(unsigned below) { return static_cast<unsigned>(random() % below); }
  void may_fail() {
    if (fails && draw(8) == 0) throw std::runtime_error("no");
  }
};

thread_local int entered = 0;

struct Scope {
  Scope() { ++entered; }
  ~Scope() { --entered; }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
};

// Instants are indices, used again as soon as they are recycled, as events are.
class TestClock {
 public:
  using Instant = int;

  explicit TestClock(World& world) : world_(world) {}

  Scope enter() const { return {}; }

  Instant now(std::uintptr_t stream) {
    require(entered > 0, "now() inside enter()");
    require(!world_.recording, "nothing is recorded into a graph");
    world_.may_fail();
    if (world_.spare.empty()) {
      world_.spare.push_back(static_cast<int>(world_.moments.size()));
      world_.moments.push_back(0);
    }
    const int instant = world_.spare.back();
    world_.spare.pop_back();
    world_.live.insert(instant);
    world_.moments[static_cast<std::size_t>(instant)] = std::max(world_.now, world_.queued[stream]);
    return instant;
  }

  std::optional<double> seconds(Instant from, Instant to) const {
    require(entered > 0, "seconds() inside enter()");
    require(world_.live.count(from) == 1 && world_.live.count(to) == 1,
            "no instant is asked for once recycled");
    world_.may_fail();
    const double begin = world_.moments[static_cast<std::size_t>(from)];
    const double end = world_.moments[static_cast<std::size_t>(to)];
    if (std::max(begin, end) > world_.reached) return std::nullopt;
    return end - begin;
  }

  void recycle(Instant instant) {
    require(world_.live.erase(instant) == 1, "an instant is recycled once");
    world_.spare.push_back(instant);
  }

  bool is_recording(std::uintptr_t) const {
    require(entered > 0, "is_recording() inside enter()");
    world_.may_fail();
    return world_.recording;
  }

 private:
  World& world_;
};

using Token = StepTimer::Token;

// Any calls in any order: no instant is lost, recycled twice or used afterwards.
void call_at_random(unsigned seed) {
  World world(seed);
  Counter counter(4);
  ClockTimer<TestClock> timer(counter, world);
  std::vector<Token> tokens{StepTimer::kNext, -1, 12345};
  world.reached = 0;
  for (int i = 0; i < 400; ++i) {
    world.fails = seed % 2 == 1 && world.draw(3) == 0;
    world.recording = world.draw(16) == 0;
    world.now += 0.001 * world.draw(100);
    world.queued[world.draw(kStreams)] = world.now + 0.01 * world.draw(100);
    const Token token = tokens[world.draw(static_cast<unsigned>(tokens.size()))];
    const std::uintptr_t stream = world.draw(kStreams);
    try {
      switch (world.draw(20)) {
        case 0:
          timer.drop(token);
          break;
        case 1:
          timer.pause();
          break;
        case 2:
          timer.measure_phases_every(world.draw(3));
          break;
        case 3:
          timer.waited(0.1);
          break;
        case 4:
          timer.poll();
          break;
        case 5:
          if (world.draw(8) == 0) timer.reset();
          break;
        case 6:
          world.reached = std::max(world.reached, world.now - 0.5);
          break;
        case 7:
        case 8:
        case 9:
          timer.finish(token, {.samples = 1});
          break;
        case 10:
        case 11:
        case 12:
          timer.touch(token, stream);
          break;
        case 13:
        case 14:
          tokens.push_back(timer.begin(stream));
          break;
        default:
          timer.mark(token, static_cast<Phase>(world.draw(kPhases)), stream);
      }
    } catch (const std::runtime_error&) {
      require(world.fails, "only the clock throws");
    }
  }
  const Reading total = counter.total();
  require(total.seconds >= 0 && total.phase_steps <= total.steps, "a reading makes sense");

  world.fails = world.recording = false;
  world.reached = 1e300;
  for (const Token token : tokens) timer.finish(token, {});
  timer.poll();
  timer.pause();
  require(world.live.size() <= 1, "only the last end is kept");
  timer.reset();
  require(world.live.empty(), "nothing is kept behind reset()");
  require(entered == 0, "every enter() ended");
}

// Steps that overlap, whose marks are anywhere: phases add up to the time that counts, which is the time that
// went by.
void add_up(unsigned seed) {
  World world(seed);
  const bool pauses = seed % 2 == 1, streams = seed % 3 == 2;
  Counter counter(4);
  ClockTimer<TestClock> timer(counter, world);
  timer.measure_phases_every(1);
  std::vector<Token> open;
  int finished = 0;
  const auto stream = [&] { return streams ? world.draw(kStreams) : 0; };
  for (int i = 0; i < 300; ++i) {
    world.now += 0.001 * world.draw(100);
    if (streams) world.queued[stream()] = world.now + 0.01 * world.draw(10);
    const unsigned choice = world.draw(10);
    if (choice < 2 || open.empty()) {
      open.push_back(timer.begin(stream()));
      timer.mark(open.back(), Phase::kForward, stream());
    } else if (choice < 4) {
      const auto which = open.begin() + world.draw(static_cast<unsigned>(open.size()));
      timer.touch(*which, stream());
      if (world.draw(2) == 0) timer.mark(*which, Phase::kUpdate, stream());
      timer.finish(*which, {.samples = 1});
      open.erase(which);
      ++finished;
    } else if (choice == 4 && pauses) {
      timer.pause();
    } else if (choice == 5) {
      world.now += 0.01;
      timer.waited(0.01);
    } else {
      const Token token =
          world.draw(2) == 0 ? StepTimer::kNext : open[world.draw(static_cast<unsigned>(open.size()))];
      timer.mark(token, static_cast<Phase>(world.draw(kPhases)), stream());
    }
  }
  const Reading total = counter.total();
  require(total.steps == finished && total.phase_steps == finished, "every step is counted");
  double phases = 0;
  for (const double seconds : total.phases) {
    require(seconds >= 0, "no phase takes less than nothing");
    phases += seconds * static_cast<double>(finished);
  }
  require(std::abs(phases - total.seconds) < 1e-9 * (1 + total.seconds), "phases add up");
  require(streams || total.seconds <= world.now + 1e-9, "no time counts twice");
}

void expect(double found, double wanted, const char* what) { require(std::abs(found - wanted) < 1e-9, what); }

void count_overlaps_once() {
  World world(0);
  Counter counter(8);
  ClockTimer<TestClock> timer(counter, world);
  const Token a = timer.begin(0), b = timer.begin(0);
  world.now = 1;
  timer.touch(a, 0);
  world.now = 3;
  timer.touch(b, 0);
  timer.finish(b, {});  // ends last, is told of first
  timer.finish(a, {});
  expect(counter.total().seconds, 3, "two steps at once take the longer one's time");
  const Token c = timer.begin(0);
  world.now = 4;
  timer.touch(c, 0);
  timer.finish(c, {});
  expect(counter.total().seconds, 4, "time goes on from the last end");
  expect(counter.total().step_seconds, (1 + 3 + 1) / 3.0, "a step's own time is whole");
}

void wait_while_another_step_runs() {
  World world(0);
  Counter counter(8);
  ClockTimer<TestClock> timer(counter, world);
  const Token a = timer.begin(0);
  timer.pause();
  timer.waited(2);  // another thread, for what begins its epoch
  world.now = 2;
  timer.touch(a, 0);
  timer.finish(a, {});
  const Token b = timer.begin(0);
  world.now = 3;
  timer.touch(b, 0);
  timer.finish(b, {});
  expect(counter.total().seconds, 3, "a wait beside a step takes no time of its own");

  counter.reset();
  timer.reset();
  timer.measure_phases_every(1);
  timer.waited(2);  // told of, not marked
  const Token c = timer.begin(0);
  timer.mark(c, Phase::kForward, 0);
  world.now = 4;
  timer.touch(c, 0);
  timer.finish(c, {});
  const Reading told = counter.total();
  expect(told.phases[static_cast<std::size_t>(Phase::kLoaderWait)], 2, "what was waited is a wait");
  expect(told.phases[static_cast<std::size_t>(Phase::kForward)], 1, "the rest is not");
}

void forget_what_was_recorded() {
  World world(0);
  Counter counter(8);
  ClockTimer<TestClock> timer(counter, world);
  const auto step = [&] {
    const Token token = timer.begin(0);
    world.now += 1;
    timer.touch(token, 0);
    timer.finish(token, {});
  };
  step();
  world.recording = true;
  const Token recorded = timer.begin(0);
  world.now += 10;
  timer.touch(recorded, 0);
  world.recording = false;
  timer.finish(recorded, {});
  step();
  expect(counter.total().seconds, 2, "recording a graph is not training");
  require(counter.total().steps == 2, "a recorded step is none");

  const Token half = timer.begin(0);  // its end falls into a recording
  world.recording = true;
  timer.touch(half, 0);
  timer.finish(half, {});
  world.recording = false;
  timer.finish(half, {});
  require(counter.total().steps == 2 && world.live.size() == 1, "a step without an end is dropped");
}

void survive_a_failed_end() {
  World world(0);
  Counter counter(8);
  ClockTimer<TestClock> timer(counter, world);
  const Token token = timer.begin(0);
  world.now = 1;
  timer.touch(token, 0);
  world.fails = true;
  for (bool failed = false; !failed;) {
    try {
      timer.touch(token, 0);
    } catch (const std::runtime_error&) {
      failed = true;
    }
  }
  world.fails = false;
  timer.finish(token, {});
  expect(counter.total().seconds, 1, "the end before the one that failed holds");
}

void measure_only_what_all_marks_are_known_of() {
  World world(0);
  Counter counter(8);
  ClockTimer<TestClock> timer(counter, world);
  timer.measure_phases_every(1);
  for (const int marks : {255, 256, 1000}) {
    timer.pause();
    for (int i = 0; i < marks; ++i) timer.mark(StepTimer::kNext, Phase::kLoaderWait, 0);
    require(world.live.size() <= 257, "marks ahead are bounded");
    const Token token = timer.begin(0);
    require(timer.measures_phases(token) == (marks < 256), "all marks or none");
    timer.drop(token);
  }
}

void use_from_many_threads(unsigned seed) {
  World world(seed);
  Counter counter(16);
  ClockTimer<TestClock> timer(counter, world);
  timer.measure_phases_every(2);
  std::vector<std::thread> threads;
  for (unsigned id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937 random(seed + id);
      for (int i = 0; i < 2000; ++i) {
        timer.mark(StepTimer::kNext, Phase::kLoaderWait, 0);
        timer.waited(1e-6);
        const Token token = timer.begin(id % kStreams);
        timer.mark(token, Phase::kForward, id % kStreams);
        timer.touch(token, id % kStreams);
        if (random() % 8 == 0) {
          timer.drop(token);
        } else {
          timer.finish(token, {.samples = 1});
        }
      }
    });
  }
  threads.emplace_back([&] {
    for (int i = 0; i < 2000; ++i) {
      timer.poll();
      static_cast<void>(counter.window());
      if (i % 50 == 0) timer.pause();
      if (i % 500 == 0) timer.reset();
    }
  });
  for (std::thread& thread : threads) thread.join();
  timer.reset();
  require(world.live.empty(), "threads lose no instant");
}

}  // namespace

int main() {
  count_overlaps_once();
  wait_while_another_step_runs();
  forget_what_was_recorded();
  survive_a_failed_end();
  measure_only_what_all_marks_are_known_of();
  for (unsigned seed = 0; seed < 1000; ++seed) {
    call_at_random(seed);
    add_up(seed);
  }
  for (unsigned seed = 0; seed < 3; ++seed) use_from_many_threads(seed);
  std::puts("ok");
}
