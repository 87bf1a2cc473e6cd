#include "scheduler/reservations.h"

#include <algorithm>

namespace kvanta::scheduler {

bool Reservations::Add(Sequence& sequence, int64_t other_bytes) {
  const int64_t bytes = cache_.spec.MaxBytes(static_cast<int64_t>(sequence.tokens.size()));
  sequences_.reserve(sequences_.size() + 1);
  sequence.reservation.emplace(bytes, cache_.pool);
  try {
    sequence.pages.HoldPrefix(sequence.tokens, sequence.reservation->held);
  } catch (...) {
    sequence.reservation.reset();
    throw;
  }
  if (!MakeRoom(sequence, sequence.reservation->Pending() + other_bytes)) {
    sequence.reservation.reset();
    return false;
  }
  const auto behind = [&](const Sequence* each) { return RunsBefore(sequence, *each); };
  sequences_.insert(std::ranges::find_if(sequences_, behind), &sequence);
  return true;
}

void Reservations::End(Sequence& sequence) noexcept {
  if (!sequence.reservation) return;
  std::erase(sequences_, &sequence);
  sequence.reservation.reset();
}

bool Reservations::EndLastBehind(const Sequence* sequence) noexcept {
  if (sequences_.empty() || (sequence != nullptr && !RunsBefore(*sequence, *sequences_.back()))) return false;
  sequences_.back()->reservation.reset();
  sequences_.pop_back();
  return true;
}

void Reservations::Trim() noexcept {
  while (AvailableBytes() < 0 && EndLastBehind(nullptr)) continue;
}

bool Reservations::MakeRoom(const Sequence& sequence, int64_t bytes) noexcept {
  int64_t behind_bytes = 0;
  for (const Sequence* each : sequences_) {
    if (RunsBefore(sequence, *each)) behind_bytes += each->reservation->bytes;
  }
  if (bytes > AvailableBytes() + behind_bytes) return false;
  while (bytes > AvailableBytes()) {
    if (!EndLastBehind(&sequence)) return false;
  }
  return true;
}

bool Reservations::HasBefore(const Sequence& sequence) const noexcept {
  return !sequences_.empty() && RunsBefore(*sequences_.front(), sequence);
}

int64_t Reservations::AvailableBytes(const Sequence* sequence) const noexcept {
  int64_t bytes = cache_.AvailableBytes();
  for (const Sequence* each : sequences_) {
    if (sequence == nullptr || RunsBefore(*each, *sequence)) bytes -= each->reservation->Pending();
  }
  return bytes;
}

}  // namespace kvanta::scheduler
