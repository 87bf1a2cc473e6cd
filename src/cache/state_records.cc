#include "cache/state_records.h"

#include <vector>

namespace kvanta::cache {

void ChangeState(PagePool& pool, const RecordChange& change, ThreadPool* threads) noexcept {
  const int group = change.record.group;
  const formats::StateCode code = pool.Layout().state_code;
  uint8_t* state = pool.Record(group, PageKind::kExact, change.record.page);
  uint8_t* coded = change.coded == kNoPage ? nullptr : pool.Record(group, PageKind::kQuantized, change.coded);
  std::vector<const formats::LayerScheme*> layers;
  for (const formats::LayerScheme& layer : pool.Layout().layers) {
    if (layer.group == group) layers.push_back(&layer);
  }
  const int64_t parts = formats::StateParts(layers.front()->state);
  auto task = [&](int64_t index, int) {
    const formats::LayerScheme& layer = *layers[static_cast<size_t>(index / parts)];
    float* of_layer = reinterpret_cast<float*>(state + layer.exact_offset);
    uint8_t* code_of_layer = coded == nullptr ? nullptr : coded + layer.offset;
    if (change.kind == RecordChangeKind::kRestoreState) {
      formats::DecodeStatePart(code, layer.state, index % parts, code_of_layer, of_layer);
    } else {
      formats::RoundStatePart(code, layer.state, index % parts, of_layer, code_of_layer);
    }
  };
  const int64_t tasks = parts * std::ssize(layers);
  if (threads != nullptr) return threads->ForEach(tasks, task);
  for (int64_t index = 0; index < tasks; ++index) task(index, 0);
}

}  // namespace kvanta::cache
