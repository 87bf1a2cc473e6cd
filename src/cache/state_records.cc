#include "cache/state_records.h"

namespace kvanta::cache {

void ChangeState(PagePool& pool, const RecordChange& change, ThreadPool* threads) noexcept {
  const int group = change.record.group;
  const formats::StateCode code = pool.Layout().state_code;
  uint8_t* state = pool.Record(group, PageKind::kExact, change.record.page);
  uint8_t* coded = change.coded == kNoPage ? nullptr : pool.Record(group, PageKind::kQuantized, change.coded);
  for (const formats::LayerScheme& layer : pool.Layout().layers) {
    if (layer.group != group) continue;
    float* of_layer = reinterpret_cast<float*>(state + layer.exact_offset);
    uint8_t* code_of_layer = coded == nullptr ? nullptr : coded + layer.offset;
    auto task = [&](int64_t part, int) {
      if (change.kind == RecordChangeKind::kRestoreState) {
        formats::DecodeStatePart(code, layer.state, part, code_of_layer, of_layer);
      } else {
        formats::RoundStatePart(code, layer.state, part, of_layer, code_of_layer);
      }
    };
    const int64_t parts = formats::StateParts(layer.state);
    if (threads != nullptr) {
      threads->ForEach(parts, task);
    } else {
      for (int64_t part = 0; part < parts; ++part) task(part, 0);
    }
  }
}

}  // namespace kvanta::cache
