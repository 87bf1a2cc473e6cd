#include "attention/cache_writer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "attention/cell_encoder.h"
#include "cache/visibility.h"
#include "formats/cell_layout.h"
#include "formats/transform.h"
#include "kernels/attention/cpu/table.h"

namespace kvanta::attention {
namespace {

using cache::PageKind;
using formats::EncodeCounts;
using formats::SideKind;
using kernels::kMaxHeadDim;

constexpr int64_t kInlineValues = 8192;  // below this, waking threads costs more than encoding

// One side of a KV head's cells in a later level.
struct LevelSide {
  int head;
  size_t level;
  SideKind kind;
};

// Sides of a layer's page in all later levels, which are encoded in any order.
int64_t SidesOf(const formats::LayerScheme& scheme) noexcept {
  return scheme.kv_heads * std::ssize(scheme.ages) * (scheme.SharesCell() ? 1 : 2);
}

LevelSide LevelSideAt(const formats::LayerScheme& scheme, int64_t index) noexcept {
  const int64_t levels = std::ssize(scheme.ages), sides = scheme.SharesCell() ? 1 : 2;
  return {.head = static_cast<int>(index / (levels * sides)),
          .level = static_cast<size_t>(index / sides % levels),
          .kind = index % sides == 0 ? SideKind::kK : SideKind::kV};
}

}  // namespace

CacheWriter::CacheWriter(cache::PagePool& pool, const BackendConfig& config, const RowKernels& kernels)
    : pool_(pool), config_(config), kernels_(kernels), counts_(std::make_unique<LayerCounts[]>(config.layers.size())) {}

void CacheWriter::AtomicCounts::Add(const SideCounts& counts) noexcept {
  if (counts.blocks != 0) blocks.fetch_add(counts.blocks, std::memory_order_relaxed);
  if (counts.zero_blocks != 0) zero_blocks.fetch_add(counts.zero_blocks, std::memory_order_relaxed);
  values.fetch_add(counts.values, std::memory_order_relaxed);
  if (counts.saturated != 0) saturated.fetch_add(counts.saturated, std::memory_order_relaxed);
  if (counts.nan != 0) nan.fetch_add(counts.nan, std::memory_order_relaxed);
}

SideCounts CacheWriter::AtomicCounts::Read() const noexcept {
  SideCounts counts;
  counts.values = values.load(std::memory_order_relaxed);
  counts.saturated = saturated.load(std::memory_order_relaxed);
  counts.nan = nan.load(std::memory_order_relaxed);
  counts.blocks = blocks.load(std::memory_order_relaxed);
  counts.zero_blocks = zero_blocks.load(std::memory_order_relaxed);
  return counts;
}

AppendCounts CacheWriter::Counts(int layer) const noexcept {
  return {.k = counts_[static_cast<size_t>(layer)].k.Read(), .v = counts_[static_cast<size_t>(layer)].v.Read()};
}

void CacheWriter::Write(const Batch& batch, int layer, const float* k, const float* v, int64_t stride,
                        ThreadPool& threads) noexcept {
  const formats::LayerScheme& scheme = pool_.Layout().layers[static_cast<size_t>(layer)];
  const int64_t head_dim = scheme.shape.head_dim;
  if (scheme.row_tokens != 1) return WriteEntries(batch, layer, k, stride);
  const std::vector<PageWrite>& writes = batch.writes[static_cast<size_t>(scheme.group)];
  auto write_side = [&](int64_t task, int) {
    const PageWrite& write = writes[static_cast<size_t>(task / scheme.kv_heads)];
    const int head = static_cast<int>(task % scheme.kv_heads);
    const int64_t offset = write.first_row * stride + head * head_dim;
    WriteSide(write, layer, head, SideKind::kK, k + offset, stride);
    if (!scheme.SharesCell()) WriteSide(write, layer, head, SideKind::kV, v + offset, stride);
  };
  const int64_t tasks = static_cast<int64_t>(writes.size()) * scheme.kv_heads;
  if (batch.rows * scheme.kv_heads * head_dim * 2 <= kInlineValues) {
    for (int64_t task = 0; task < tasks; ++task) write_side(task, 0);
  } else {
    threads.ForEach(tasks, write_side);
  }
  // After the writes: a page may close and age in one step.
  const std::vector<cache::PageRef>& aging = batch.aging[static_cast<size_t>(scheme.group)];
  if (aging.empty()) return;
  const int64_t of_page = SidesOf(scheme);
  auto age_side = [&](int64_t task, int) {
    const cache::PageRef& page = aging[static_cast<size_t>(task / of_page)];
    const LevelSide side = LevelSideAt(scheme, task % of_page);
    const PageKind level = cache::kAgedKinds[side.level];
    if (page.Of(level) == cache::kNoPage) return;  // no query will read it
    EncodeLevel(pool_.Record(scheme.group, PageKind::kQuantized, page.quantized),
                pool_.Record(scheme.group, level, page.Of(level)), layer, side.head, side.level, side.kind);
  };
  threads.ForEach(std::ssize(aging) * of_page, age_side);
}

// Writes the entries that end in the step's tokens, those of a page at once.
void CacheWriter::WriteEntries(const Batch& batch, int layer, const float* k, int64_t stride) noexcept {
  const formats::LayerScheme& scheme = pool_.Layout().layers[static_cast<size_t>(layer)];
  const int64_t tokens = scheme.row_tokens, rows = scheme.shape.tokens, page_size = pool_.Layout().page_size;
  for (const SequenceRows& sequence : batch.sequences) {
    const int64_t end = sequence.End() / tokens;
    for (int64_t entry = sequence.span.start / tokens; entry < end;) {
      const int64_t next = std::min(end, (entry / rows + 1) * rows);
      const int64_t last_token = (entry + 1) * tokens - 1, page = cache::PageOfEntry(entry, tokens, page_size);
      const int64_t first = std::exchange(entry, next);
      if (!pool_.IsOwnPage(scheme.group, page)) continue;
      const PageWrite write{.page = sequence.span.pages[scheme.group][page],
                            .first_slot = static_cast<int>(first % rows),
                            .last_slot = static_cast<int>(first % rows + next - first),
                            .first_row = sequence.first_row + last_token - sequence.span.start};
      WriteSide(write, layer, 0, SideKind::kK, k + write.first_row * stride, tokens * stride);
    }
  }
}

void CacheWriter::EncodeLevels(int group, const uint8_t* quantized, std::span<uint8_t* const> later,
                               ThreadPool& threads) noexcept {
  const std::vector<formats::LayerScheme>& layers = pool_.Layout().layers;
  int64_t max_sides = 0;  // of a layer
  for (const formats::LayerScheme& layer : layers) max_sides = std::max(max_sides, SidesOf(layer));
  auto encode_side = [&](int64_t task, int) {
    const int layer = static_cast<int>(task / max_sides);
    const formats::LayerScheme& scheme = layers[static_cast<size_t>(layer)];
    if (scheme.group != group || task % max_sides >= SidesOf(scheme)) return;
    const LevelSide side = LevelSideAt(scheme, task % max_sides);
    if (later[side.level] != nullptr) {
      EncodeLevel(quantized, later[side.level], layer, side.head, side.level, side.kind);
    }
  };
  threads.ForEach(std::ssize(layers) * max_sides, encode_side);
}

// Encodes a later level of a cell from the first level's.
void CacheWriter::EncodeLevel(const uint8_t* quantized, uint8_t* record, int layer, int head, size_t level,
                              SideKind kind) noexcept {
  const bool is_key = kind == SideKind::kK;
  const formats::LayerScheme& scheme = pool_.Layout().layers[static_cast<size_t>(layer)];
  const formats::AgeScheme& age = scheme.ages[level];
  const formats::Side &from = is_key ? scheme.k : scheme.v, &to = is_key ? age.k : age.v;
  const formats::LayerScales& scales = config_.scales[static_cast<size_t>(layer)];
  const formats::HeadParameters parameters{(is_key ? scales.k : scales.v).scale[static_cast<size_t>(head)]};
  const formats::AgeCells cells = scheme.CellsOf(age, head);
  SideCounts counts;  // the values were counted when they were written
  CellEncoder(kind, scheme.shape, {from.format, from.sections, parameters}, {to.format, to.sections, 1.0F}, kernels_,
              counts)
      .Encode(quantized + (is_key ? scheme.KCell(head) : scheme.VCell(head)), record + (is_key ? cells.k : cells.v));
  if (is_key && scheme.UnquantizedShape().head_dim != 0) {
    std::memcpy(record + cells.unquantized, quantized + scheme.KUnquantized(head),
                static_cast<size_t>(scheme.UnquantizedBytes()));
  }
}

void CacheWriter::WriteSide(const PageWrite& write, int layer, int head, SideKind kind, const float* rows,
                            int64_t stride) noexcept {
  const bool is_key = kind == SideKind::kK;
  const formats::LayerScheme& scheme = pool_.Layout().layers[static_cast<size_t>(layer)];
  const formats::Side& side = is_key ? scheme.k : scheme.v;
  const formats::SideScales& scales =
      is_key ? config_.scales[static_cast<size_t>(layer)].k : config_.scales[static_cast<size_t>(layer)].v;
  const formats::HeadParameters parameters{scales.scale[static_cast<size_t>(head)],
                                           side.query ? scales.query->Allocation(head) : nullptr, side.unused_channels};
  formats::RowTransform transform = formats::TransformOf(side, scales, head, scheme.shape.head_dim);
  transform.multiply = kernels_.multiply;
  uint8_t* quantized = nullptr;
  const formats::CellShape unquantized_shape{.tokens = scheme.shape.tokens,
                                             .head_dim = is_key ? scheme.UnquantizedShape().head_dim : 0};
  uint8_t* unquantized = nullptr;  // unquantized channels of the exact record, or of the quantized one if there is none
  if (write.page.quantized != cache::kNoPage) {
    uint8_t* record = pool_.Record(scheme.group, PageKind::kQuantized, write.page.quantized);
    quantized = record + (is_key ? scheme.KCell(head) : scheme.VCell(head));
    unquantized = record + scheme.KUnquantized(head);
  }
  uint8_t* exact = nullptr;
  const formats::CellSections exact_sections = formats::Bf16Sections(side.shape);
  if (scheme.exact_open) {
    uint8_t* record = pool_.Record(scheme.group, PageKind::kExact, write.page.exact);
    exact = record + (is_key ? scheme.ExactKCell(head) : scheme.ExactVCell(head));
    unquantized = record + scheme.ExactKUnquantized(head);
  }

  formats::RowBuffer buffer;
  alignas(64) float x[kMaxHeadDim];
  float outlier_values[KvScheme::kMaxOutliers];
  SideCounts counts;
  EncodeCounts unquantized_counts;
  for (int slot = write.first_slot; slot < write.last_slot; ++slot) {
    const float* row = rows + (slot - write.first_slot) * stride;
    // Scalar, unlike the queries' transform: the NaN payload of an operation on two NaNs depends on the ISA.
    transform.Forward(row, x, outlier_values);
    const formats::Format& format = exact ? ExactFormat() : *side.format;
    const formats::RowSections encoded =
        scheme.HasEntries() ? formats::CanonicalRow(format, side.sections, slot, quantized) : buffer.Sections();
    EncodeRow(format, x, side.shape.head_dim, parameters, kernels_, encoded, counts);
    if (!exact) CountZeroScales(format, side.shape.head_dim, encoded, counts);
    if (scheme.HasEntries()) continue;
    formats::StoreRow(kind, format, side.shape, exact ? exact_sections : side.sections, slot, encoded,
                      exact ? exact : quantized);
    if (unquantized_shape.head_dim == 0) continue;
    const float* channels = scheme.SharesCell() ? row + scheme.shape.head_dim : outlier_values;
    scheme.unquantized_format->encode_row(channels, unquantized_shape.head_dim, 1.0F, buffer.Sections(),
                                          unquantized_counts);
    formats::StoreRow(kind, *scheme.unquantized_format, unquantized_shape, scheme.UnquantizedSections(), slot,
                      buffer.Sections(), unquantized);
  }
  counts.values = int64_t{write.last_slot - write.first_slot} * scheme.shape.head_dim;  // padding does not count
  if (!scheme.SharesCell()) unquantized_counts.values = 0;  // outliers are already counted with the row
  counts += unquantized_counts;
  if (exact && quantized && write.last_slot == scheme.shape.tokens) {
    SideCounts closing;
    CellEncoder(kind, side.shape, {&ExactFormat(), exact_sections, 1.0F}, {side.format, side.sections, parameters},
                kernels_, closing)
        .Encode(exact, quantized);
    counts.saturated += closing.saturated;  // values and NaN were counted on write
    counts.blocks += closing.blocks;
    counts.zero_blocks += closing.zero_blocks;
    if (unquantized_shape.head_dim != 0) {
      std::memcpy(quantized + side.sections.bytes, unquantized, static_cast<size_t>(scheme.UnquantizedBytes()));
    }
  }
  LayerCounts& total = counts_[static_cast<size_t>(layer)];
  (is_key ? total.k : total.v).Add(counts);
}

}  // namespace kvanta::attention
