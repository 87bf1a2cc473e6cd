#include "attention/cache_writer.h"

#include <algorithm>
#include <cstring>

#include "attention/cell_encoder.h"
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
  if (scheme.ages.empty()) return;
  // After the writes: a page may close and age in one step.
  const std::vector<cache::PageRef>& aging = batch.aging[static_cast<size_t>(scheme.group)];
  const int64_t levels = std::ssize(scheme.ages), sides = scheme.SharesCell() ? 1 : 2;
  const int64_t of_page = scheme.kv_heads * levels * sides;
  auto age_side = [&](int64_t task, int) {
    const int64_t within = task % of_page;
    AgeSide(aging[static_cast<size_t>(task / of_page)], layer, static_cast<int>(within / (levels * sides)),
            static_cast<size_t>(within / sides % levels), within % sides == 0 ? SideKind::kK : SideKind::kV);
  };
  if (!aging.empty()) threads.ForEach(std::ssize(aging) * of_page, age_side);
}

// Encodes a later level of a cell from the first level's.
void CacheWriter::AgeSide(const cache::PageRef& page, int layer, int head, size_t level, SideKind kind) noexcept {
  const cache::PageKind page_kind = cache::kAgedKinds[level];
  if (page.Of(page_kind) == cache::kNoPage) return;  // no query will read it
  const bool is_key = kind == SideKind::kK;
  const formats::LayerScheme& scheme = pool_.Layout().layers[static_cast<size_t>(layer)];
  const formats::AgeScheme& age = scheme.ages[level];
  const formats::Side &from = is_key ? scheme.k : scheme.v, &to = is_key ? age.k : age.v;
  const formats::LayerScales& scales = config_.scales[static_cast<size_t>(layer)];
  const formats::HeadParameters parameters{(is_key ? scales.k : scales.v).scale[static_cast<size_t>(head)]};
  const formats::AgeCells cells = scheme.CellsOf(age, head);
  const uint8_t* source = pool_.Record(scheme.group, PageKind::kQuantized, page.quantized);
  uint8_t* record = pool_.Record(scheme.group, page_kind, page.Of(page_kind));
  SideCounts counts;  // the values were counted when they were written
  CellEncoder(kind, scheme.shape, {from.format, from.sections, parameters}, {to.format, to.sections, 1.0F}, kernels_,
              counts)
      .Encode(source + (is_key ? scheme.KCell(head) : scheme.VCell(head)), record + (is_key ? cells.k : cells.v));
  if (is_key && scheme.UnquantizedShape().head_dim != 0) {
    std::memcpy(record + cells.unquantized, source + scheme.KUnquantized(head),
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
                                           side.query ? scales.query->Allocation(head) : nullptr};
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
  const formats::CellSections exact_sections = formats::Bf16Sections(scheme.shape);
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
    EncodeRow(format, x, scheme.shape.head_dim, parameters, kernels_, buffer.Sections(), counts);
    if (!exact) CountZeroScales(format, scheme.shape.head_dim, buffer.Sections(), counts);
    formats::StoreRow(kind, format, scheme.shape, exact ? exact_sections : side.sections, slot, buffer.Sections(),
                      exact ? exact : quantized);
    if (unquantized_shape.head_dim == 0) continue;
    const float* channels = scheme.SharesCell() ? row + scheme.shape.head_dim : outlier_values;
    scheme.unquantized_format->encode_row(channels, unquantized_shape.head_dim, 1.0F, buffer.Sections(),
                                          unquantized_counts);
    formats::StoreRow(kind, *scheme.unquantized_format, unquantized_shape, scheme.UnquantizedSections(), slot,
                      buffer.Sections(), unquantized);
  }
  if (!scheme.SharesCell()) unquantized_counts.values = 0;  // outliers are already counted with the row
  counts += unquantized_counts;
  if (exact && quantized && write.last_slot == scheme.shape.tokens) {
    SideCounts closing;
    CellEncoder(kind, scheme.shape, {&ExactFormat(), exact_sections, 1.0F}, {side.format, side.sections, parameters},
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
