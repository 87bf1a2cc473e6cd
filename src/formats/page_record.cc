#include "formats/page_record.h"

#include <fmt/format.h>

#include "formats/cell_layout.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

// Calls visit(side kind, format, cell shape, its planes, offset in the record) for every cell of the record.
template <class Visit>
void ForEachCell(const CacheLayout& layout, int group, RecordKind kind, Visit visit) {
  const Format& bf16 = Find("bf16");
  for (const LayerScheme& layer : layout.layers) {
    if (layer.group != group) continue;
    const CellSections exact = Bf16Sections(layer.shape), plain = layer.UnquantizedSections();
    for (int head = 0; head < layer.kv_heads; ++head) {
      if (kind == RecordKind::kQuantized) {
        visit(SideKind::kK, *layer.k.format, layer.shape, layer.k.sections, layer.KCell(head));
        visit(SideKind::kK, *layer.plain, layer.UnquantizedShape(), plain, layer.KUnquantized(head));
        if (!layer.SharesCell()) visit(SideKind::kV, *layer.v.format, layer.shape, layer.v.sections, layer.VCell(head));
      } else if (layer.exact_open) {
        visit(SideKind::kK, bf16, layer.shape, exact, layer.ExactKCell(head));
        visit(SideKind::kK, *layer.plain, layer.UnquantizedShape(), plain, layer.ExactKUnquantized(head));
        if (!layer.SharesCell()) visit(SideKind::kV, bf16, layer.shape, exact, layer.ExactVCell(head));
      }
    }
  }
}

void CheckSize(const CacheLayout& layout, int group, RecordKind kind, size_t bytes) {
  if (bytes != static_cast<size_t>(RecordBytes(layout, group, kind))) {
    throw InputError(
        fmt::format("a page of {} bytes for a cache whose pages have {}", bytes, RecordBytes(layout, group, kind)));
  }
}

}  // namespace

int64_t RecordBytes(const CacheLayout& layout, int group, RecordKind kind) noexcept {
  const GroupBytes& bytes = layout.groups[static_cast<size_t>(group)];
  return kind == RecordKind::kQuantized ? bytes.page_bytes : bytes.exact_page_bytes;
}

std::vector<uint8_t> RecordToCanonical(const CacheLayout& layout, int group, RecordKind kind,
                                       std::span<const uint8_t> record) {
  CheckSize(layout, group, kind, record.size());
  std::vector<uint8_t> canonical(record.size());
  ForEachCell(layout, group, kind,
              [&](SideKind side, const Format& format, CellShape shape, const CellSections& sections, int64_t offset) {
                ToCanonical(side, format, shape, sections, record.data() + offset, canonical.data() + offset);
              });
  return canonical;
}

std::vector<uint8_t> RecordFromCanonical(const CacheLayout& layout, int group, RecordKind kind,
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
