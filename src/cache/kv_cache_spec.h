// KV cache groups: layers whose pages have the same lifetime (same visibility and page rule) share a block table and
// page pools. Layers of a group may differ in heads, head_dim, scheme and page bytes; all groups share one byte budget.
// Compare vLLM's hybrid KV cache groups and TensorRT-LLM's pool per window.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include "base/math.h"
#include "cache/page_pool.h"
#include "cache/visibility.h"
#include "formats/scheme.h"

namespace kvanta::cache {

// KV cache group: determines which records a sequence keeps. In a step over positions [start, start + tokens), page j
// has
//   a quantized record  if some layer writes it directly, or if the page is closed (filled to its last token in this
//                       step or before) and j >= quantized_from
//   an exact record     if some layer keeps exact pages, and the page holds one of the step's positions, or is one of
//                       the exact_before pages before the first of these, or j < sink_pages
// and neither once no later query sees the page. With precision by age (ages) the records of later levels are encoded,
// all at once, in the step of the first query that is old enough (AgingPosition); the quantized record goes after that
// step, a later level's with the first query of the next one. With precision by pressure (ages.floors) they take the
// quantized record's place when a page is demoted (SequenceCache::Demote). A group of recurrent layers has a record
// (recurrent_state.h) of the page of the step's last position, and of closed pages where a prefix hit may end
// (KeepsSnapshot). With rounded states (formats::CacheLayout::state_grid) the former are exact records, which no prefix
// hit reads, and the latter quantized ones, of pages that end at the grid.
struct KvCacheGroup {
  // layers: visibility per layer, [layout.layers.size()]. ranks: as of KvCacheSpec.
  KvCacheGroup(const formats::CacheLayout& layout, int group, std::span<const Visibility> layers, int ranks = 1);

  std::vector<int> layers;
  Visibility visibility;  // common visibility of the layers; full if they differ
  int page_size = 64;
  int ranks = 1;  // that pages are dealt to; 1: every rank has all of them
  int64_t page_bytes = 0;
  int64_t exact_page_bytes = 0;
  bool quantized_while_open = false;  // some layer writes the quantized record directly
  bool exact_while_open = false;      // some layer keeps its open page exact
  int exact_before = 0;               // closed pages before the open one that some layer reads exactly: 0 or 1
  int quantized_from = 0;             // first page that needs a quantized record when closed
  int sink_pages = 0;                 // first pages of a sequence, which keep their exact record
  // Recurrent layers: every so many pages keep their state, so that states take about the memory of the other groups'
  // pages. 0: no recurrent layers.
  int64_t snapshot_interval = 0;
  int64_t state_grid = 0;  // pages between positions at which states are rounded; 0: they are not
  AgeRule ages;            // later levels of all layers
  std::array<int64_t, std::size(kAgedKinds)> age_bytes = {};  // of their records

  bool IsRecurrent() const noexcept { return visibility.kind == VisibilityKind::kRecurrent; }
  // True if a recurrent group keeps the state at the end of closed page `page` for prefix hits of any length.
  bool KeepsSnapshot(int64_t page) const noexcept { return (page + 1) % snapshot_interval == 0; }
  bool RoundsStates() const noexcept { return state_grid != 0; }
  // Kind of the records of working states.
  PageKind WorkingKind() const noexcept { return RoundsStates() ? PageKind::kExact : PageKind::kQuantized; }
  // The last page up to `page` at whose end a state may be kept; -1: none.
  int64_t LastSnapshotPage(int64_t page) const noexcept {
    return RoundsStates() ? (page + 1) / state_grid * state_grid - 1 : page;
  }
  bool NeedsQuantized(int64_t page, bool closed) const noexcept {
    return quantized_while_open || (closed && page >= quantized_from);
  }
  // ---- precision by age. Pages that a sequence has at `position`: it has the tokens before it.

  // Position of the first query that reads `page` from a later level.
  int64_t AgingPosition(int64_t page) const noexcept { return (page + ages.pages[0]) * page_size; }
  // First page that has not aged at `position`.
  int64_t FirstYoung(int64_t position) const noexcept {
    return ages.IsUsed() ? std::max<int64_t>(ages.ageless, CeilDiv(position, page_size) - ages.pages[0]) : 0;
  }
  // False once `page` has aged, that is, when queries from `position` on neither read its quantized record nor encode a
  // later level from it.
  bool KeepsQuantized(int64_t page, int64_t position) const noexcept {
    return page >= FirstYoung(position) || page < ages.ageless;
  }
  // True if some query reads `page` from the level `kind`: not where a window ends before.
  bool Reaches(PageKind kind, int64_t page) const noexcept {
    const int64_t age = ages.pages[AgeIndex(kind)];
    return age != AgeRule::kNoAge && page >= ages.ageless &&
           visibility.LastQuery((page + 1) * page_size - 1) >= (page + age) * page_size;
  }
  // True if queries from `position` on read the record of the later level `kind` of a page that has aged.
  bool KeepsAged(PageKind kind, int64_t page, int64_t position) const noexcept {
    const size_t next = AgeIndex(kind) + 1;
    const bool is_left = next < ages.Levels() && position / page_size - page >= ages.pages[next];
    return Reaches(kind, page) && !is_left;
  }
  // True if `page`, closed, has its record `kind` between steps, for queries from `position` on. Not of exact records.
  bool Keeps(PageKind kind, int64_t page, int64_t position) const noexcept {
    if (kind == PageKind::kQuantized) return NeedsQuantized(page, true) && KeepsQuantized(page, position);
    return !KeepsQuantized(page, position) && KeepsAged(kind, page, position);
  }

  // ---- precision by pressure

  // True if `page`, closed, may be demoted.
  bool IsDemotable(int64_t page) const noexcept {
    return ages.HasFloor() && page >= ages.ageless && NeedsQuantized(page, true);
  }
  // Bytes of a page's records from `level` on, which a page of a later level has.
  int64_t LevelBytes(int level) const noexcept {
    if (level == 0) return page_bytes;
    return level == 1 ? age_bytes[0] + age_bytes[1] : age_bytes[1];
  }
  int64_t FloorBytes() const noexcept { return LevelBytes(ages.floors); }

  // active: the page holds a position of the step.
  bool NeedsExact(int64_t page, bool active) const noexcept {
    return exact_while_open && (active || page < sink_pages);
  }
  // First page visible to queries at `position` or later.
  int64_t FirstPage(int64_t position) const noexcept { return visibility.First(position) / page_size; }
  // Mean bytes of a page's records but exact ones, in a sequence of `tokens` tokens: with precision by age they depend
  // on it.
  double MeanPageBytes(int64_t tokens) const noexcept;
  // Maximum bytes, on one rank, of a sequence of `tokens` tokens in a step of up to `step_pages` pages; 0 pages: in no
  // step, after a prefix hit. With precision by pressure: with all pages at the floor that may be, and the pool's
  // reserve.
  int64_t MaxBytes(int64_t tokens, int64_t step_pages) const noexcept;
  // The same, with no page demoted.
  int64_t MaxFirstLevelBytes(int64_t tokens, int64_t step_pages) const noexcept;

 private:
  int64_t HeldPages(int64_t tokens, int64_t step_pages) const noexcept;
};

struct KvCacheSpec {
  // layers: visibility per layer; empty: full. ranks: those that the pages of a sequence are dealt to, one after the
  // other; bytes are those of one rank. Throws InputError if layers have different numbers of floors.
  explicit KvCacheSpec(const formats::CacheLayout& layout, std::span<const Visibility> layers = {}, int ranks = 1);

  int page_size = 64;
  int ranks = 1;
  std::vector<KvCacheGroup> groups;
  int floors = 0;  // later levels by pressure, of all groups that have some

  int64_t PageBytes() const noexcept;  // a page's records but exact ones, summed over all groups
  // Mean bytes of a token in a sequence of `tokens` tokens, without exact records and states.
  double BytesPerToken(int64_t tokens) const noexcept;
  // The same with all pages at the floor; 0 without precision by pressure.
  double FloorBytesPerToken() const noexcept;
  // Maximum bytes of a sequence of `tokens` tokens in a step of up to `step_pages` pages, summed over all groups.
  int64_t MaxBytes(int64_t tokens, int64_t step_pages = 1) const noexcept;
  // The same, with no page demoted.
  int64_t MaxFirstLevelBytes(int64_t tokens, int64_t step_pages = 1) const noexcept;
  // Smallest cache that holds MaxBytes(): a PagePool has room for a page of each kind.
  int64_t MinCacheBytes(int64_t tokens, int64_t step_pages = 1) const noexcept;
};

// Later levels of a layer.
AgeRule AgesOf(const formats::LayerScheme& layer) noexcept;

// Assigns layers to groups for formats::PlanCache: by visibility, page rule and ages, numbered in order of first
// appearance.
std::vector<int> GroupLayers(std::span<const KvScheme> schemes, std::span<const Visibility> layers);

}  // namespace kvanta::cache
