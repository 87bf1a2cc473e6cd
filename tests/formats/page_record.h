// A page of a KV cache group's layers as the cache holds it, to and from canonical bytes: the same cells in the same
// order and of the same sizes, each in its canonical form.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <span>
#include <vector>

#include "formats/cell_layout.h"
#include "formats/scheme.h"
#include "kvanta/error.h"

namespace kvanta::formats {

enum class RecordKind : uint8_t {
  kQuantized,  // every layer of the group, in its formats
  kExact,      // the layers with exact pages, in bf16
};
// Calls visit(side kind, format, cell shape, its sections, offset in the record) for every cell of the record.
template <class Visit>
void ForEachCell(const CacheLayout& layout, int group, RecordKind kind, Visit visit) {
  const Format& bf16 = Find("bf16");
  for (const LayerScheme& layer : layout.layers) {
    if (layer.group != group) continue;
    const CellSections exact_k = Bf16Sections(layer.k.shape), exact_v = Bf16Sections(layer.v.shape);
    const CellSections unquantized = layer.UnquantizedSections();
    for (int head = 0; head < layer.kv_heads; ++head) {
      if (kind == RecordKind::kQuantized) {
        visit(SideKind::kK, *layer.k.format, layer.k.shape, layer.k.sections, layer.KCell(head));
        visit(SideKind::kK, *layer.unquantized_format, layer.UnquantizedShape(), unquantized, layer.KUnquantized(head));
        if (!layer.SharesCell()) {
          visit(SideKind::kV, *layer.v.format, layer.v.shape, layer.v.sections, layer.VCell(head));
        }
      } else if (layer.exact_open) {
        visit(SideKind::kK, bf16, layer.k.shape, exact_k, layer.ExactKCell(head));
        visit(SideKind::kK, *layer.unquantized_format, layer.UnquantizedShape(), unquantized,
              layer.ExactKUnquantized(head));
        if (!layer.SharesCell()) visit(SideKind::kV, bf16, layer.v.shape, exact_v, layer.ExactVCell(head));
      }
    }
  }
}

inline int64_t RecordBytes(const CacheLayout& layout, int group, RecordKind kind) noexcept {
  const GroupBytes& bytes = layout.groups[static_cast<size_t>(group)];
  return kind == RecordKind::kQuantized ? bytes.page_bytes : bytes.exact_page_bytes;
}

inline void CheckSize(const CacheLayout& layout, int group, RecordKind kind, size_t bytes) {
  if (bytes != static_cast<size_t>(RecordBytes(layout, group, kind))) {
    throw InputError(
        fmt::format("a page of {} bytes for a cache whose pages have {}", bytes, RecordBytes(layout, group, kind)));
  }
}

inline std::vector<uint8_t> RecordToCanonical(const CacheLayout& layout, int group, RecordKind kind,
                                              std::span<const uint8_t> record) {
  CheckSize(layout, group, kind, record.size());
  std::vector<uint8_t> canonical(record.size());
  ForEachCell(layout, group, kind,
              [&](SideKind side, const Format& format, CellShape shape, const CellSections& sections, int64_t offset) {
                ToCanonical(side, format, shape, sections, record.data() + offset, canonical.data() + offset);
              });
  return canonical;
}

inline std::vector<uint8_t> RecordFromCanonical(const CacheLayout& layout, int group, RecordKind kind,
                                                std::span<const uint8_t> canonical) {
  CheckSize(layout, group, kind, canonical.size());
  std::vector<uint8_t> record(canonical.size());
  ForEachCell(layout, group, kind,
              [&](SideKind side, const Format& format, CellShape shape, const CellSections& sections, int64_t offset) {
                FromCanonical(side, format, shape, sections, canonical.data() + offset, record.data() + offset);
              });
  return record;
}

}  // namespace kvanta::formats
