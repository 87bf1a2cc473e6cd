#include "scheduler/prompt_order.h"

#include <algorithm>
#include <limits>

namespace kvanta::scheduler {
namespace {

constexpr double kAloneTimes = 4;       // of what a prompt takes alone it may wait by default
constexpr double kOvertaking = 0.5;     // seconds that others may take at once from the oldest prompt
constexpr size_t kMaxUsers = 4096;      // beyond, those without a sequence are forgotten
constexpr double kGeneratedWeight = 2;  // of a generated token for its user, as in the paper

}  // namespace

void PromptOrder::Add(const Sequence& sequence) {
  if (!config_.fair) return;
  User& user = users_[sequence.user];
  if (user.sequences++ > 0) return;
  // A user who comes back has no claim on the time of those who stayed.
  double lowest = std::numeric_limits<double>::infinity();
  for (const auto& [name, other] : users_) {
    if (&other != &user && other.sequences > 0) lowest = std::min(lowest, other.served);
  }
  if (lowest != std::numeric_limits<double>::infinity()) user.served = std::max(user.served, lowest);
}

void PromptOrder::Remove(const Sequence& sequence) noexcept {
  if (oldest_ == &sequence) oldest_ = nullptr;  // its address may become another sequence's
  const auto user = config_.fair ? users_.find(sequence.user) : users_.end();
  if (user == users_.end() || --user->second.sequences > 0) return;
  const double served = user->second.served;
  // A user who has had more than another one could gain by being forgotten.
  const bool is_ahead = std::ranges::any_of(
      users_, [&](const auto& each) { return each.second.sequences > 0 && each.second.served < served; });
  if (!is_ahead) users_.erase(user);
  if (users_.size() > kMaxUsers) std::erase_if(users_, [](const auto& each) { return each.second.sequences == 0; });
}

void PromptOrder::Begin(std::span<Sequence* const> prompts, std::optional<double> now, double token_seconds) noexcept {
  by_length_ = config_.shortest_first && now;
  now_ = now.value_or(0);
  token_seconds_ = token_seconds;
  const auto oldest =
      std::ranges::min_element(prompts, [](const Sequence* a, const Sequence* b) { return RunsBefore(*a, *b); });
  const Sequence* first = oldest == prompts.end() ? nullptr : *oldest;
  if (first != oldest_) overtaken_ = 0;
  oldest_ = first;
}

double PromptOrder::Length(const Sequence& sequence) const noexcept {
  const auto remaining = static_cast<double>(sequence.Uncached());
  if (token_seconds_ <= 0) return remaining;
  const auto length = static_cast<double>(std::ssize(sequence.tokens) - sequence.prefix_tokens);
  const double max_delay = config_.max_delay > 0 ? config_.max_delay : kAloneTimes * length * token_seconds_;
  const double waited = now_ - sequence.added;
  return waited < max_delay ? remaining * (1 - waited / max_delay) : max_delay - waited;  // the most overdue one first
}

double PromptOrder::Served(const Sequence& sequence) const noexcept {
  const auto user = users_.find(sequence.user);
  return user == users_.end() ? 0 : user->second.served;
}

bool PromptOrder::Before(const Sequence& a, const Sequence& b) const noexcept {
  if (a.priority != b.priority) return a.priority < b.priority;
  if (by_length_ && overtaken_ >= kOvertaking && (&a == oldest_) != (&b == oldest_)) return &a == oldest_;
  if (config_.fair && a.user != b.user) {
    const double of_a = Served(a), of_b = Served(b);
    if (of_a != of_b) return of_a < of_b;
  }
  if (!by_length_) return a.arrival < b.arrival;
  const double length_of_a = Length(a), length_of_b = Length(b);
  return length_of_a != length_of_b ? length_of_a < length_of_b : a.arrival < b.arrival;
}

void PromptOrder::Charge(const Sequence& sequence, int64_t tokens, double seconds, bool is_prompt) noexcept {
  if (is_prompt)
    overtaken_ = std::clamp(overtaken_ + (&sequence == oldest_ ? -seconds : seconds), 0.0, 2 * kOvertaking);
  if (!config_.fair) return;
  const auto user = users_.find(sequence.user);
  if (user != users_.end()) user->second.served += (is_prompt ? 1 : kGeneratedWeight) * static_cast<double>(tokens);
}

}  // namespace kvanta::scheduler
