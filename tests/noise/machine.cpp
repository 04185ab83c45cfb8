// machine.cpp: the model of tests/noise/simulator.py, whose steps a benchmark repeats a hundred million
// times.
//
// One thread on two cores. All times are in seconds, and all random numbers come from the seed.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <random>

namespace {

constexpr double kCores = 2;
constexpr double kChunk = 0.05;         // longest work between two looks at speed and load
constexpr double kSpeedSeconds = 0.1;   // between changes of the clock
constexpr double kThrottleSeconds = 3;  // of a period with throttling, and of one without
constexpr double kNever = std::numeric_limits<double>::infinity();

// The same fields as in class Scenario of simulator.py, in the same order.
struct Scenario {
  double jitter, busy, comes_and_goes, stalls, stall_seconds, walk, trend, contention, refill, pause_every,
      pause_seconds, tail, throttled;
};

// The constants of the Python module, in the order in which it passes them.
struct Constants {
  double slice, share_seconds, slowest, layout;
};

class Machine {
 public:
  Machine(const Scenario& scenario, const Constants& constants, std::uint64_t seed)
      : scenario_(scenario), constants_(constants), random_(seed), busy_(scenario.busy) {
    busy_until_ = scenario.comes_and_goes != 0 ? 0 : kNever;
    slice_left_ = slices(constants.slice, 1);
    next_stall_ = interval(scenario.stalls);
    next_pause_ = scenario.pause_every > 0 ? scenario.pause_every * uniform() : kNever;
    phase_ = 2 * kThrottleSeconds * uniform();
  }

  double wall() const { return wall_; }
  double cpu() const { return cpu_; }

  // Runs `updates` updates, after an untimed one if `warm_up`, and writes their wall times.
  void block(double step, int updates, bool warm_up, double* walls) {
    step *= std::exp(normal(constants_.layout));
    if (warm_up) work(step);
    block_start_ = cpu_;
    for (int i = 0; i < updates; ++i) {
      const double start = wall_;
      work(step);
      walls[i] = wall_ - start;
    }
  }

  double block_cpu() const { return cpu_ - block_start_; }

 private:
  void work(double seconds) {
    if (scenario_.tail > 0 && uniform() < scenario_.tail)
      seconds *= std::pow(1 - uniform(), -1 / 1.5);  // Pareto
    double left = seconds * std::exp(normal(scenario_.jitter));
    if (busy_ > 1) left *= 1 + scenario_.contention * uniform();
    while (left > 0) {
      if (wall_ >= changes_at_) change();
      const bool shares = waits_ > 1;
      double chunk = std::min(left, kChunk);
      if (shares && left < kChunk) chunk = std::min(chunk, slice_left_);
      double took = chunk * speed_ * contention_;
      if (is_throttled()) took *= scenario_.throttled;
      advance(took, took);
      left -= chunk;
      if (shares) {
        slice_left_ -= chunk;
        if (slice_left_ <= 1e-12) preempt();
      }
      stall();
    }
  }

  // Updates speed and load.
  void change() {
    while (wall_ >= speed_until_) {
      const double drift =
          normal(scenario_.walk * std::sqrt(kSpeedSeconds)) + scenario_.trend * kSpeedSeconds;
      speed_ = std::min(constants_.slowest, speed_ * std::exp(drift));
      contention_ = 1 + (busy_ > 1 ? scenario_.contention * uniform() : 0);
      speed_until_ += kSpeedSeconds;
    }
    while (wall_ >= share_until_) {
      share_ = std::exp(normal(0.25));
      share_until_ += constants_.share_seconds;
    }
    while (wall_ >= busy_until_) {
      constexpr double kLoads[] = {0, 0, 2, 4, 8};
      busy_ = kLoads[std::uniform_int_distribution<int>(0, 4)(random_)];
      busy_until_ += interval(0.5);
    }
    waits_ = busy_ > 1 ? std::max(1.0, (busy_ + 1) / kCores * share_) : 1;
    changes_at_ = std::min({speed_until_, share_until_, busy_until_});
  }

  // Waits for the slices of other processes, at the end of a slice or of several.
  void preempt() {
    const double count = 1 - slice_left_ / constants_.slice;
    const double waited = slices(constants_.slice * (waits_ - 1), count);
    advance(waited, 0);
    if (scenario_.refill > 0) {
      const double refill = gamma(count, scenario_.refill);  // exponential for one slice
      advance(refill, refill);
    }
    slice_left_ = slices(constants_.slice, 1);
  }

  // Waits for the stalls and garbage collections that are due.
  void stall() {
    while (wall_ >= next_stall_) {
      advance(interval(1 / scenario_.stall_seconds), 0);
      next_stall_ += interval(scenario_.stalls);
    }
    while (wall_ >= next_pause_) {
      advance(scenario_.pause_seconds, scenario_.pause_seconds);
      next_pause_ += scenario_.pause_every;
    }
  }

  bool is_throttled() const {
    return scenario_.throttled != 1 && std::fmod(wall_ + phase_, 2 * kThrottleSeconds) < kThrottleSeconds;
  }

  void advance(double wall, double cpu) {
    wall_ += wall;
    cpu_ += cpu;
  }

  // Returns the sum of `count` times with a gamma distribution of shape 4.
  double slices(double mean, double count) { return gamma(4 * count, mean / 4); }

  double gamma(double shape, double scale) { return std::gamma_distribution<double>(shape, scale)(random_); }
  double normal(double deviation) { return deviation * normal_(random_); }
  double uniform() { return std::uniform_real_distribution<double>()(random_); }
  double interval(double rate) {
    return rate > 0 ? std::exponential_distribution<double>(rate)(random_) : kNever;
  }

  Scenario scenario_;
  Constants constants_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  double wall_ = 0, cpu_ = 0, block_start_ = 0;
  double busy_;
  double share_ = 1, waits_ = 1;  // processes that share a core
  double speed_ = 1, contention_ = 1;
  double speed_until_ = 0, share_until_ = 0, busy_until_ = 0, changes_at_ = 0;
  double slice_left_ = 0, next_stall_ = 0, next_pause_ = 0, phase_ = 0;
};

}  // namespace

extern "C" {

// The caller owns the memory of a machine, which needs no destruction.
std::int64_t machine_bytes() { return sizeof(Machine); }

void machine_create(void* memory, const Scenario* scenario, const Constants* constants, std::uint64_t seed) {
  new (memory) Machine(*scenario, *constants, seed);
}

// Writes wall times of the updates. `totals` receives CPU time of the block, wall and CPU time since the
// start.
void machine_block(void* memory, double step, int updates, int warm_up, double* walls, double* totals) {
  auto& machine = *static_cast<Machine*>(memory);
  machine.block(step, updates, warm_up != 0, walls);
  totals[0] = machine.block_cpu();
  totals[1] = machine.wall();
  totals[2] = machine.cpu();
}

}  // extern "C"
