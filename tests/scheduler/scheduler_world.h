// A cache and its scheduler, with sequences for tests.
#pragma once

#include <memory>

#include "scheduler/scheduler.h"

namespace kvanta::scheduler {

inline constexpr int kPage = 16;

// floor: pages may be demoted to half of their bytes.
inline formats::CacheLayout Layout(bool exact, int sink, bool floor = false) {
  formats::CacheLayout layout;
  layout.page_size = kPage;
  layout.page_bytes = 1024;
  layout.exact_page_bytes = exact ? 3072 : 0;
  layout.groups = {{layout.page_bytes, layout.exact_page_bytes}};
  formats::LayerScheme layer;
  layer.exact_open = exact;
  layer.exact_pages = exact ? 1 : 0;
  layer.sink_pages = sink;
  if (floor) {
    layer.ages.push_back({});
    layer.scheme.ages = {{.tokens = KvAge::kFloor, .k = {}, .v = {}}};
    layout.age_bytes[0] = layout.groups[0].age_bytes[0] = layout.page_bytes / 2;
  }
  layout.layers.push_back(layer);
  return layout;
}

struct World {
  World(SchedulerConfig config, int64_t budget, bool exact = true, int sink = 1, bool prefix = true, bool floor = false)
      : cache(Cpu(), Layout(exact, sink, floor), {}, {.budget_bytes = budget, .poison_unused = false}, prefix),
        scheduler(config, cache) {}

  std::unique_ptr<Sequence> Make(int64_t tokens, int32_t value = 3) {
    auto sequence = std::make_unique<Sequence>(cache, "");
    sequence->tokens.assign(static_cast<size_t>(tokens), value);
    return sequence;
  }

  // Adds a sequence and computes all its tokens.
  void Run(Sequence& sequence) {
    scheduler.Add(sequence);
    while (sequence.Remaining() > 0 && !scheduler.Schedule().empty()) scheduler.Commit();
  }

  void Decode(Sequence& sequence) {
    if (sequence.Remaining() == 0) sequence.tokens.push_back(7);
    scheduler.Schedule();
    scheduler.Commit();
  }

  cache::KvCacheManager cache;
  Scheduler scheduler;
};

inline SchedulerConfig Config(int sequences, int tokens) {
  return {.max_sequences = sequences, .max_step_tokens = tokens, .page_size = kPage};
}

}  // namespace kvanta::scheduler
