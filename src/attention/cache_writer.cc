#include "attention/cache_writer.h"

#include <algorithm>
#include <cstring>

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

constexpr int kMaxTokenGroup = 32;

// Counts the zero scales of an encoded row.
void CountZeroScales(const formats::Format& format, int head_dim, const formats::RowSections& row,
                     SideCounts& counts) noexcept {
  const formats::Scaling& scaling = format.scaling;
  const auto count = [&](formats::ScaleType type, const uint8_t* scales, int blocks) {
    if (type == formats::ScaleType::kE8M0) return;  // cannot represent zero
    const auto bytes = static_cast<size_t>(formats::Bytes(type));
    for (int block = 0; block < blocks; ++block) {
      const uint8_t* scale = scales + static_cast<size_t>(block) * bytes;
      counts.zero_blocks += std::all_of(scale, scale + bytes, [](uint8_t byte) { return byte == 0; }) ? 1 : 0;
    }
    counts.blocks += blocks;
  };
  // With an offset, a block of equal values has scale 0 without loss: not counted.
  if (scaling.block != formats::ScaleType::kNone && !scaling.block_offset) {
    count(scaling.block, row.block_scales, head_dim / formats::BlockChannels(scaling, head_dim));
  } else if (scaling.block == formats::ScaleType::kNone && scaling.token != formats::ScaleType::kNone &&
             !scaling.token_offset) {
    count(scaling.token, row.token_scales, 1);
  }
}

// format.encode_row, where a search takes most of the time by the given one.
void EncodeRow(const formats::Format& format, const float* x, int head_dim, formats::HeadParameters head,
               const RowKernels& kernels, const formats::RowSections& out, SideCounts& counts) noexcept {
  if (formats::IsTrellis(format.code)) {
    return formats::EncodeTrellisRow(format.code_bits, x, head_dim, head, out, counts, kernels.search_trellis);
  }
  if (formats::IsAllocated(format.code) && head.allocation != nullptr) {
    return formats::EncodeKltRow(*head.allocation, x, out, counts, kernels.search_klt);
  }
  format.encode_row(x, head_dim, head, out, counts);
}

// Quantizes a closed page's exact cell into its quantized cell.
class PageQuantizer {
 public:
  PageQuantizer(SideKind kind, const formats::Side& side, formats::HeadParameters head, const RowKernels& kernels,
                SideCounts& counts) noexcept
      : kind_(kind), side_(side), shape_(side.shape), head_(head), kernels_(kernels), counts_(counts) {}

  void Close(const formats::CellSections& exact_sections, const uint8_t* exact, uint8_t* quantized) noexcept {
    const formats::Format& format = *side_.format;
    const int step = std::max(1, format.scaling.token_group);
    for (int slot = 0; slot < shape_.tokens; slot += step) {
      for (int row = 0; row < step; ++row) {
        formats::LoadRow(kind_, ExactFormat(), shape_, exact_sections, slot + row, exact, buffer_.Sections());
        ExactFormat().decode_row(buffer_.Sections(), shape_.head_dim, 1.0f, x_ + row * shape_.head_dim);
      }
      if (format.encode_token_group != nullptr) {
        QuantizeTokenGroup(slot, quantized);
      } else {
        EncodeRow(format, x_, shape_.head_dim, head_, kernels_, buffer_.Sections(), counts_);
        CountZeroScales(format, shape_.head_dim, buffer_.Sections(), counts_);
        formats::StoreRow(kind_, format, shape_, side_.sections, slot, buffer_.Sections(), quantized);
      }
    }
  }

 private:
  void QuantizeTokenGroup(int slot, uint8_t* quantized) noexcept {
    const formats::Format& format = *side_.format;
    const formats::CellSections& sections = side_.sections;
    formats::GroupSections tile =
        formats::CanonicalTokenGroup(format, sections, shape_.head_dim, slot / format.scaling.token_group, quantized);
    tile.codes = codes_;  // channel sections are the same in every layout
    format.encode_token_group(x_, shape_.head_dim, tile, counts_);
    for (int row = 0; row < format.scaling.token_group; ++row) {
      formats::StoreRow(kind_, format, shape_, sections, slot + row, {.codes = codes_ + row * sections.row_bytes},
                        quantized);
    }
  }

  SideKind kind_;
  const formats::Side& side_;
  formats::CellShape shape_;
  formats::HeadParameters head_;
  const RowKernels& kernels_;
  SideCounts& counts_;
  formats::RowBuffer buffer_;
  alignas(64) float x_[kMaxTokenGroup * kMaxHeadDim];
  uint8_t codes_[kMaxTokenGroup * kMaxHeadDim];
};

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
    EncodeRow(format, x, side.shape.head_dim, parameters, kernels_, buffer.Sections(), counts);
    if (!exact) CountZeroScales(format, side.shape.head_dim, buffer.Sections(), counts);
    formats::StoreRow(kind, format, side.shape, exact ? exact_sections : side.sections, slot, buffer.Sections(),
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
    PageQuantizer(kind, side, parameters, kernels_, closing).Close(exact_sections, exact, quantized);
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
