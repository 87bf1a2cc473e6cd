// Level events: demotions of pages of a sequence (docs/pressure.md). With the tokens, a sequence's events say from
// which level each query reads each page: replaying them gives the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kvanta/kv_scheme.h"

namespace kvanta::cache {

using LevelEvent = KvCacheEvent;
using LevelEvents = std::vector<LevelEvent>;  // by position, not descending

// Adds an event, as part of the last one where it continues that.
inline void AddEvent(LevelEvents& events, const LevelEvent& event) {
  if (!events.empty()) {
    LevelEvent& last = events.back();
    if (last.position == event.position && last.level == event.level && last.end_page == event.first_page) {
      last.end_page = event.end_page;
      return;
    }
  }
  events.push_back(event);
}

// The events of queries in page `page`, of a list by position.
inline std::span<const LevelEvent> EventsIn(std::span<const LevelEvent> events, int64_t page, int64_t page_size) {
  const auto first = std::ranges::lower_bound(events, page * page_size, {}, &LevelEvent::position);
  return {first, std::ranges::lower_bound(first, events.end(), (page + 1) * page_size, {}, &LevelEvent::position)};
}

}  // namespace kvanta::cache
