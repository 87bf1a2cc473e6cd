// The scheduler's time: how much of which prompt a step has time for.
#include <algorithm>
#include <bit>

#include "scheduler/scheduler.h"

namespace kvanta::scheduler {
namespace {

constexpr double kPromptSeconds = 0.04;   // for prompts in a step in which sequences decode, at least
constexpr double kFewPrompts = 4;         // prompts, beyond which it grows with their number
constexpr double kMaxShare = 6;           // times
constexpr double kIdleSeconds = 0.1;      // likewise, while none does,
constexpr double kIdleSteps = 4;          // times this
constexpr int64_t kFirstRows = 16;        // of the first step, which nothing is known about
constexpr int64_t kGrowth = 4;            // times the rows of the largest step until now: beyond, its time is a guess
constexpr int64_t kRowUnit = 8;           // rows that kernels compute together
constexpr int64_t kMeasuredPrompt = 128;  // tokens of a chunk, of which the time of a prompt's token is known

}  // namespace

// Sets the time that the step may take, in which all sequences that decode have a token already.
void Scheduler::LimitTime(const StepClock& clock) {
  const double part = 1.0 / config_.steps_in_flight;
  const auto streams = std::ranges::count_if(running_, [](const Sequence* each) { return each->Remaining() <= 1; });
  const bool has_streams = streams > 0;
  const double decodes = has_streams ? times_.Seconds(work_) : PromptSeconds(0, 1);
  const double given = config_.max_step_seconds * part;
  // Streams wait longer where many wait for a first token: large chunks are efficient.
  const auto prompts = static_cast<double>(Running() - streams + Waiting());
  const double share = std::clamp(prompts / kFewPrompts, 1.0, kMaxShare);
  const double automatic = std::max(2 * decodes, decodes + share * kPromptSeconds * part);
  stream_seconds_ = (given > 0 ? given : automatic) - clock.spent;
  const double idle = kIdleSteps * (given > 0 ? given : std::max(2 * decodes, kIdleSeconds * part)) - clock.spent;
  seconds_ = has_streams ? stream_seconds_ : idle;
}

double Scheduler::PromptSeconds(int64_t start, int64_t tokens) const noexcept {
  StepWork chunk;
  times_.Add(chunk, start, tokens, 0);
  return times_.Seconds(chunk);
}

double Scheduler::PromptTokenSeconds() const noexcept {
  return PromptSeconds(0, kMeasuredPrompt) / static_cast<double>(kMeasuredPrompt);
}

double Scheduler::PromptSecondsLeft() const noexcept {
  int64_t tokens = 0;
  for (const auto* queue : {&running_, &waiting_}) {
    for (const Sequence* each : *queue) tokens += each->Uncached() > 1 ? each->Uncached() : 0;
  }
  return static_cast<double>(tokens) * PromptTokenSeconds();
}

// The largest count in [fits, limit] whose rows the step has time for: add(work, count) adds them. Rows beyond a few
// times the most of a step until now are a guess, and left out.
template <class AddWork>
int64_t Scheduler::InTime(int64_t fits, int64_t limit, AddWork add) const {
  const auto rows = static_cast<int64_t>(work_.rows);
  const int64_t known = std::max(kFirstRows, kGrowth * times_.MeasuredRows()) - rows;
  for (int64_t above = std::min(limit, known) + 1; above - fits > 1;) {
    const int64_t count = fits + (above - fits) / 2;
    StepWork work = work_;
    add(work, count);
    (times_.Seconds(work) <= SecondsLeft() ? fits : above) = count;
  }
  return fits;
}

// As many of the next `limit` tokens as the step has time for; at least kRowUnit of a step's first prompt.
int64_t Scheduler::TokensInTime(const Sequence& sequence, int64_t limit) const {
  const auto rows = static_cast<int64_t>(work_.rows);
  const int64_t fits =
      InTime(HasPromptChunk() ? 0 : std::min(limit, kRowUnit), limit, [&](StepWork& work, int64_t tokens) {
        times_.Add(work, sequence.pages.Length(), tokens, LogitRows(sequence, tokens));
      });
  if (fits == limit || fits <= kRowUnit) return fits;
  const auto unit =
      std::max(kRowUnit / 2, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(rows + fits))) / 8);
  return std::max(kRowUnit, (rows + fits) / unit * unit - rows);
}

int64_t Scheduler::DraftRowsLeft() const noexcept {
  if (seconds_ == kNoLimit) return budget_;
  return InTime(0, budget_, [](StepWork& work, int64_t rows) {
    work.rows += static_cast<double>(rows);
    work.logits += static_cast<double>(rows);
  });
}

}  // namespace kvanta::scheduler
