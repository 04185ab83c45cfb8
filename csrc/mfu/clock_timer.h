// clock_timer.h: the step timer for any clock. The time of an instant may become known later.
#pragma once

#include <algorithm>
#include <cmath>
#include <list>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "mfu/step_timer.h"

namespace flatout::mfu {

// A Clock has:
//   Instant                        copyable; a value or a handle
//   Instant now(stream)            returns the moment at which the work queued so far ends
//   optional<double> seconds(a, b) returns the seconds from a to b, or nullopt while they are unknown
//   void recycle(Instant)          frees an instant for reuse
//   bool is_recording(stream)      true if queued work is recorded into a graph instead of run
//   enter()                        returns a scope that must live during now(), seconds() and is_recording()
template <class Clock>
class ClockTimer final : public StepTimer {
  using Instant = typename Clock::Instant;

 public:
  template <class... Args>
  explicit ClockTimer(Counter& counter, Args&&... args)
      : counter_(counter), clock_(std::forward<Args>(args)...) {}

  Token begin(std::uintptr_t stream) override {
    [[maybe_unused]] const auto scope = clock_.enter();
    const std::scoped_lock lock(mutex_);
    if (clock_.is_recording(stream)) {
      forget_gap();
      return kRecorded;
    }
    const Instant begun = clock_.now(stream);
    if (spare_.empty()) spare_.emplace_back();
    Span& step = spare_.front();
    step.begun = begun;
    step.alone = std::exchange(alone_, false);
    step.measured = measures_next() && ahead_.size() < kMostAhead;
    step.before.swap(ahead_);
    step.waited = std::exchange(waited_, 0.0);
    step.token = ++last_token_;
    ++begun_;
    open_.splice(open_.end(), spare_, spare_.begin());
    return last_token_;
  }

  void measure_phases_every(std::int64_t steps) override {
    const std::scoped_lock lock(mutex_);
    phases_every_ = steps;
  }

  bool measures_phases(Token token) override {
    const std::scoped_lock lock(mutex_);
    const auto step = find(token);
    return step != open_.end() && step->measured;
  }

  void mark(Token token, Phase phase, std::uintptr_t stream) override {
    const std::scoped_lock lock(mutex_);
    std::vector<Mark>* marks = nullptr;
    if (token == kNext) {
      if (measures_next() && ahead_.size() < kMostAhead) marks = &ahead_;
    } else if (const auto step = find(token); step != open_.end() && step->measured) {
      marks = &step->within;
    }
    if (marks == nullptr) return;
    [[maybe_unused]] const auto scope = clock_.enter();
    if (!clock_.is_recording(stream)) marks->push_back({phase, clock_.now(stream)});
  }

  void touch(Token token, std::uintptr_t stream) override {
    const std::scoped_lock lock(mutex_);
    const auto step = find(token);
    if (step == open_.end()) return;  // recorded into a graph, or reset() came in between
    [[maybe_unused]] const auto scope = clock_.enter();
    if (clock_.is_recording(stream)) return;
    const Instant now = clock_.now(stream);
    recycle(step->ended);
    step->ended = now;
  }

  void finish(Token token, const Work& work) override {
    [[maybe_unused]] const auto scope = clock_.enter();
    const std::scoped_lock lock(mutex_);
    const auto step = find(token);
    if (step == open_.end()) return;
    if (!step->ended) return forget(step);
    step->work = work;
    pending_.splice(pending_.end(), open_, step);
    settle();
  }

  void drop(Token token) override {
    const std::scoped_lock lock(mutex_);
    const auto step = find(token);
    if (step != open_.end()) forget(step);
  }

  void waited(double seconds) override {
    const std::scoped_lock lock(mutex_);
    waited_ += seconds;
  }

  void pause() override {
    const std::scoped_lock lock(mutex_);
    forget_gap();
  }

  void poll() override {
    [[maybe_unused]] const auto scope = clock_.enter();
    const std::scoped_lock lock(mutex_);
    settle();
  }

  void reset() override {
    const std::scoped_lock lock(mutex_);
    while (!open_.empty()) recycle(open_, open_.begin());
    while (!pending_.empty()) recycle(pending_, pending_.begin());
    forget_gap();
    recycle(last_end_);
    begun_ = 0;
  }

 private:
  struct Mark {
    Phase phase;
    Instant at;
  };
  struct Span {
    Token token = kNext;
    Instant begun{};
    bool alone = false;     // the time before the step is not training
    bool measured = false;  // the phases of the step are measured
    std::optional<Instant> ended;
    std::vector<Mark> before, within;  // marks before and after `begun`
    Work work;
    double waited = 0;
  };
  using Spans = std::list<Span>;

  static constexpr Token kRecorded = -1;
  // Limit of the marks before a step. A loop that only reads its loader adds marks and never begins a step.
  // If the limit is reached, the phases of the next step are not measured.
  static constexpr std::size_t kMostAhead = 256;

  // A linear search is enough, because rarely more than one step is open.
  typename Spans::iterator find(Token token) {
    return std::find_if(open_.begin(), open_.end(), [&](const Span& step) { return step.token == token; });
  }

  bool measures_next() const {
    // The first step of a job is a warm-up, so its phases are measured only if all steps are measured.
    return phases_every_ > 0 && begun_ % phases_every_ == (phases_every_ > 1 ? 1 : 0);
  }

  // Adds finished steps with known times to the counter, in the order in which they finished.
  void settle() {
    while (!pending_.empty()) {
      Span& span = pending_.front();
      const std::optional<Step> step = finished_step(span);
      if (!step) return;
      counter_.add(*step);
      if (!last_end_ || !(step->gap + step->seconds < 0)) {  // keeps the latest end if steps overlap
        recycle(last_end_);
        last_end_ = std::exchange(span.ended, std::nullopt);
      }
      recycle(pending_, pending_.begin());
    }
  }

  std::optional<Step> finished_step(const Span& span) const {
    const Instant ended = span.ended.value_or(span.begun);  // a finished step has an end
    const std::optional<double> duration = clock_.seconds(span.begun, ended);
    const std::optional<double> since_end = last_end_ ? clock_.seconds(*last_end_, span.begun) : kUnknown;
    if (!duration || !since_end) return std::nullopt;
    Step step{
        .work = span.work, .seconds = *duration, .gap = *since_end, .waited = span.waited, .phases = {}};
    if (span.alone && !(*since_end < 0)) {
      // Training resumes with the wait for the batch. Another step counts the part of this wait that it
      // overlaps.
      if (span.before.empty()) {
        step.gap = kUnknown;
        step.waited = std::fmin(span.waited, *since_end);
      } else {
        const std::optional<double> lead = clock_.seconds(span.before.front().at, span.begun);
        if (!lead) return std::nullopt;
        step.gap = std::fmin(*lead, *since_end);
      }
    }
    if (!span.within.empty() && !add_phases(span, step)) return std::nullopt;
    return step;
  }

  // Adds the times between marks to the phases, over all the time that counts for the step. Marks of other
  // streams or threads may be outside this time or out of order. Such marks move to the nearest valid moment.
  bool add_phases(const Span& span, Step& step) const {
    PhaseSeconds& phases = step.phases.emplace();
    const double end = std::max(step.seconds, 0.0);  // all in seconds from `begun`
    double since = std::min(-step.lead(), end);
    Phase phase = std::isnan(step.gap) ? Phase::kLoaderWait : Phase::kHostIdle;
    const auto reach = [&](std::optional<double> at, Phase next) {
      if (!at) return false;
      const double until = std::clamp(*at, since, end);
      phases[static_cast<std::size_t>(phase)] += until - since;
      since = until;
      phase = next;
      return true;
    };
    const auto reach_all = [&](const std::vector<Mark>& marks) {
      return std::all_of(marks.begin(), marks.end(), [&](const Mark& mark) {
        return reach(clock_.seconds(span.begun, mark.at), mark.phase);
      });
    };
    return reach_all(span.before) && reach(0.0, Phase::kHostIdle) && reach_all(span.within) &&
           reach(end, Phase::kHostIdle);
  }

  void recycle(Spans& spans, typename Spans::iterator step) {
    clock_.recycle(step->begun);
    recycle(step->ended);
    recycle(step->before);
    recycle(step->within);
    spare_.splice(spare_.begin(), spans, step);
  }

  void recycle(std::optional<Instant>& instant) {
    if (instant) clock_.recycle(*instant);
    instant.reset();
  }

  void recycle(std::vector<Mark>& marks) {
    for (const Mark& mark : marks) clock_.recycle(mark.at);
    marks.clear();
  }

  void forget(typename Spans::iterator step) {
    recycle(open_, step);
    forget_gap();
  }

  void forget_gap() {
    recycle(ahead_);
    waited_ = 0;
    alone_ = true;
  }

  Counter& counter_;
  std::int64_t phases_every_ = 0;
  Clock clock_;
  std::mutex mutex_;
  Spans open_, pending_, spare_;  // running, waiting for the clock, free for reuse
  Token last_token_ = kNext;
  std::int64_t begun_ = 0;
  std::vector<Mark> ahead_;  // marks of the step that begins next
  std::optional<Instant> last_end_;
  double waited_ = 0;
  bool alone_ = true;
};

}  // namespace flatout::mfu
