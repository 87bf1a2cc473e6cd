// Visibility: which keys a query position sees, and which record of their pages it reads. Depends only on positions
// and is shared by host and device, so every chunking, batch, prefix hit or preemption reads the same bytes.
#pragma once

#include <cstdint>
#include <limits>

#include "base/host_device.h"
#include "cache/page_kind.h"

namespace kvanta::cache {

// Page of a compressed entry, which stands for `row_tokens` tokens: that of its last token.
template <class T>
KVANTA_HD constexpr T PageOfEntry(T entry, T row_tokens, T page_size) noexcept {
  return ((entry + 1) * row_tokens - 1) / page_size;
}

enum class VisibilityKind : uint8_t {
  kFull,           // keys [0, query]
  kSlidingWindow,  // keys (query - span, query]
  kChunked,        // keys of the query's own chunk of `span` positions, up to itself (Llama 4)
  kRecurrent,      // no keys: the state after the token before the query (Gated DeltaNet); span is 2
};

struct Visibility {
  VisibilityKind kind = VisibilityKind::kFull;
  int32_t span = 0;  // tokens of the window or chunk; 0 for kFull
  // Keys after the query, too: all (kFull), or as many as a window has before it. Of sequences that one step computes.
  bool both_directions = false;

  bool operator==(const Visibility&) const = default;
  KVANTA_HD constexpr bool IsFull() const noexcept { return kind == VisibilityKind::kFull; }

  // First key position that a query at `query` sees. Does not decrease with `query`. GPU kernels use T = int32_t, for a
  // 32-bit division.
  template <class T>
  KVANTA_HD constexpr T First(T query) const noexcept {
    if (kind == VisibilityKind::kFull) return 0;
    if (kind == VisibilityKind::kChunked) return query / span * span;
    return query >= span ? query - span + 1 : 0;
  }
  // Last key position that a query at `query` of a sequence of `tokens` tokens sees. Does not decrease with `query`.
  template <class T>
  KVANTA_HD constexpr T Last(T query, T tokens) const noexcept {
    if (!both_directions) return query;
    if (kind == VisibilityKind::kFull) return tokens - 1;
    return query + span < tokens ? query + span - 1 : tokens - 1;
  }
  // Last query position to which a key at `key` is visible.
  KVANTA_HD constexpr int64_t LastQuery(int64_t key) const noexcept {
    if (kind == VisibilityKind::kFull) return std::numeric_limits<int64_t>::max();
    if (kind == VisibilityKind::kChunked) return (key / span + 1) * span - 1;
    return key + span - 1;
  }
};

// Visibility of recurrent layers: like a window of two tokens, a step reads the page that holds the token before it.
inline constexpr Visibility kRecurrentVisibility{VisibilityKind::kRecurrent, 2};

// Sliding-window visibility; window 0: full.
constexpr Visibility SlidingWindow(int window) noexcept {
  return window > 0 ? Visibility{VisibilityKind::kSlidingWindow, window} : Visibility{};
}

// Pages [first, end) of a sequence.
template <class T>
struct PageRange {
  T first, end;

  KVANTA_HD constexpr bool Contains(T page) const noexcept { return page >= first && page < end; }
};

// Page rule (docs/formats.md): pages that a query reads from their exact (bf16) record instead of the quantized one.
struct ExactPageRule {
  int32_t open = 0;   // pages up to and including the query's own: 0, 1 (the open page) or 2
  int32_t sinks = 0;  // first pages of the sequence

  bool operator==(const ExactPageRule&) const = default;
  // Pages that a query in page `own` reads from their quantized record. GPU kernels use T = int32_t.
  template <class T>
  KVANTA_HD constexpr PageRange<T> Quantized(T own) const noexcept {
    return {open != 0 ? sinks : 0, own - open + 1};
  }
  // True if a query in page `own` reads the exact record of `page`. Pages after its own are open ones.
  KVANTA_HD constexpr bool Reads(int64_t own, int64_t page) const noexcept {
    return open != 0 && !Quantized(own).Contains(page);
  }
};

// Later levels. By age (docs/ages.md): pages far enough before a query's own are read from one. By pressure
// (docs/pressure.md): pages of which a sequence has no other record (HeldLevel).
struct AgeRule {
  static constexpr int32_t kNoAge = std::numeric_limits<int32_t>::max();

  int32_t ageless = 0;                                      // first pages of a sequence, which have no later level
  int32_t floors = 0;                                       // number of later levels by pressure
  int32_t pages[std::size(kAgedKinds)] = {kNoAge, kNoAge};  // ages in pages, ascending

  bool operator==(const AgeRule&) const = default;
  // True with levels by age.
  KVANTA_HD constexpr bool IsUsed() const noexcept { return pages[0] != kNoAge; }
  constexpr bool HasFloor() const noexcept { return floors != 0; }
  // Number of later levels.
  constexpr size_t Levels() const noexcept {
    if (HasFloor()) return static_cast<size_t>(floors);
    return pages[1] != kNoAge ? 2 : IsUsed() ? 1 : 0;
  }
  // Level that a query in page `own` reads of `page`, which the exact page rule does not make exact.
  template <class T>
  KVANTA_HD constexpr PageKind Level(T own, T page) const noexcept {
    const T distance = own - page;
    if (distance < pages[0] || page < ageless) return PageKind::kQuantized;
    return distance < pages[1] ? PageKind::kAged : PageKind::kAgedTwice;
  }
};

// The record that a query in page `own` reads of `page`: a function of the two alone, but for levels by pressure, which
// stand for kQuantized.
struct PageRule {
  ExactPageRule exact;
  AgeRule ages;

  bool operator==(const PageRule&) const = default;
  template <class T>
  KVANTA_HD constexpr PageKind Kind(T own, T page) const noexcept {
    return exact.open == 0 || exact.Quantized(own).Contains(page) ? ages.Level(own, page) : PageKind::kExact;
  }
};

}  // namespace kvanta::cache
