// Kinds of a page's records: quantized (with precision by age: the first level), exact (bf16), and later levels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace kvanta::cache {

// The numbers are those of page files (store/page_file.h).
enum class PageKind : uint8_t { kQuantized, kExact, kAged, kAgedTwice };
inline constexpr PageKind kPageKinds[] = {PageKind::kQuantized, PageKind::kExact, PageKind::kAged,
                                          PageKind::kAgedTwice};
// Later levels, in order.
inline constexpr PageKind kAgedKinds[] = {PageKind::kAged, PageKind::kAgedTwice};

// Place of a kind in arrays [kind].
constexpr size_t KindIndex(PageKind kind) noexcept {
  return static_cast<size_t>(kind);
}
// Place of a record in arrays [group][kind].
constexpr size_t RecordIndex(int group, PageKind kind) noexcept {
  return static_cast<size_t>(group) * std::size(kPageKinds) + KindIndex(kind);
}
constexpr bool IsAged(PageKind kind) noexcept {
  return kind >= PageKind::kAged;
}
// Place of a later level in KvScheme::ages and the like.
constexpr size_t AgeIndex(PageKind kind) noexcept {
  return KindIndex(kind) - KindIndex(PageKind::kAged);
}
// Kind of the records of a level: 0 is the first one.
constexpr PageKind LevelKind(int level) noexcept {
  return level == 0 ? PageKind::kQuantized : kAgedKinds[level - 1];
}
// True for the records of a page at `level`: its own, and with a later level those after it.
constexpr bool IsOfLevel(PageKind kind, int level) noexcept {
  return level == 0 ? kind == PageKind::kQuantized : IsAged(kind) && static_cast<int>(AgeIndex(kind)) + 1 >= level;
}
constexpr const char* Name(PageKind kind) noexcept {
  constexpr const char* kNames[] = {"quantized", "exact", "second level's", "third level's"};
  return kNames[KindIndex(kind)];
}

}  // namespace kvanta::cache
