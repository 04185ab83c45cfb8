// host_timer.cpp: step times on the host's steady clock, for devices that work while the host waits (the
// CPU).
#include <chrono>
#include <mutex>
#include <utility>

#include "mfu/step_timer.h"

namespace flatout::mfu {
namespace {

constexpr double kNanosecond = 1e-9;

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class HostTimer final : public StepTimer {
 public:
  explicit HostTimer(Counter& counter) : counter_(counter) {}

  Token begin(std::uintptr_t) override { return now(); }  // the token is the time itself

  void end(Token begun, std::uintptr_t, std::int64_t samples, double flops) override {
    const std::int64_t ended = now();
    double gap = kUnknown, waited = 0;
    {
      const std::scoped_lock lock(mutex_);
      if (last_end_ != kNever) gap = static_cast<double>(begun - last_end_) * kNanosecond;
      waited = std::exchange(waited_, 0.0);
      last_end_ = ended;
    }
    counter_.add(static_cast<double>(ended - begun) * kNanosecond, gap, waited, samples, flops);
  }

  void drop(Token) override {}

  void waited(double seconds) override {
    const std::scoped_lock lock(mutex_);
    waited_ += seconds;
  }

  void poll() override {}

  void reset() override {
    const std::scoped_lock lock(mutex_);
    last_end_ = kNever;
    waited_ = 0;
  }

 private:
  static constexpr std::int64_t kNever = -1;

  Counter& counter_;
  std::mutex mutex_;
  std::int64_t last_end_ = kNever;
  double waited_ = 0;
};

}  // namespace

std::unique_ptr<StepTimer> make_host_timer(Counter& counter) { return std::make_unique<HostTimer>(counter); }

}  // namespace flatout::mfu
