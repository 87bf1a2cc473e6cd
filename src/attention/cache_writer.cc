#include "attention/cache_writer.h"

#include "formats/cell_layout.h"
#include "formats/transform.h"
#include "kernels/cpu/attention_table.h"

namespace kvanta::attention {
namespace {

using cache::PageKind;
using formats::EncodeCounts;
using formats::SideKind;
using kernels::kMaxHeadDim;

constexpr int64_t kInlineValues = 8192;  // below this, waking threads costs more than the encoding

// Room for one token's planes in any format.
struct RowBuffer {
  alignas(64) uint8_t codes[kMaxHeadDim * 4];
  alignas(64) uint8_t block_scales[kMaxHeadDim];
  alignas(64) uint8_t token_scales[16];
  formats::RowPlanes Planes() noexcept { return {codes, block_scales, token_scales}; }
};

}  // namespace

CacheWriter::CacheWriter(cache::PageStore& store, const BackendConfig& config)
    : store_(store), config_(config), counts_(std::make_unique<LayerCounts[]>(config.layers.size())) {}

void CacheWriter::AtomicCounts::Add(const EncodeCounts& counts) noexcept {
  values.fetch_add(counts.values, std::memory_order_relaxed);
  if (counts.saturated != 0) saturated.fetch_add(counts.saturated, std::memory_order_relaxed);
  if (counts.nan != 0) nan.fetch_add(counts.nan, std::memory_order_relaxed);
}

EncodeCounts CacheWriter::AtomicCounts::Read() const noexcept {
  return {.values = values.load(std::memory_order_relaxed),
          .saturated = saturated.load(std::memory_order_relaxed),
          .nan = nan.load(std::memory_order_relaxed)};
}

AppendCounts CacheWriter::Counts(int layer) const noexcept {
  return {.k = counts_[static_cast<size_t>(layer)].k.Read(), .v = counts_[static_cast<size_t>(layer)].v.Read()};
}

void CacheWriter::Write(const Batch& batch, int layer, const float* k, const float* v, int64_t stride,
                        ThreadPool& threads) noexcept {
  const formats::LayerScheme& scheme = store_.Layout().layers[static_cast<size_t>(layer)];
  const int64_t head_dim = scheme.shape.head_dim;
  auto write = [&](int64_t task, int) {
    const TouchedPage& touched = batch.touched[static_cast<size_t>(task / scheme.kv_heads)];
    const int head = static_cast<int>(task % scheme.kv_heads);
    const int64_t offset = touched.first_row * stride + head * head_dim;
    WriteSide(touched, layer, head, SideKind::kK, k + offset, stride);
    WriteSide(touched, layer, head, SideKind::kV, v + offset, stride);
  };
  const int64_t tasks = static_cast<int64_t>(batch.touched.size()) * scheme.kv_heads;
  if (batch.rows * scheme.kv_heads * head_dim * 2 <= kInlineValues) {
    for (int64_t task = 0; task < tasks; ++task) write(task, 0);
  } else {
    threads.ForEach(tasks, write);
  }
}

void CacheWriter::WriteSide(const TouchedPage& touched, int layer, int head, SideKind kind, const float* rows,
                            int64_t stride) noexcept {
  const bool is_key = kind == SideKind::kK;
  const formats::LayerScheme& scheme = store_.Layout().layers[static_cast<size_t>(layer)];
  const formats::Side& side = is_key ? scheme.k : scheme.v;
  const formats::SideScales& scales =
      is_key ? config_.scales[static_cast<size_t>(layer)].k : config_.scales[static_cast<size_t>(layer)].v;
  const float static_scale = scales.scale[static_cast<size_t>(head)];
  const int head_dim = scheme.shape.head_dim;
  const float* mean = side.mean ? scales.mean.data() + int64_t{head} * head_dim : nullptr;
  uint8_t* quantized = nullptr;
  if (touched.page.quantized != cache::kNoPage) {
    quantized = store_.Base(PageKind::kQuantized) + touched.page.quantized * store_.RecordBytes(PageKind::kQuantized) +
                (is_key ? scheme.KCell(head) : scheme.VCell(head));
  }
  uint8_t* exact = nullptr;
  const formats::Format& exact_format = ExactFormat();
  formats::CellPlanes exact_planes;
  if (scheme.exact_open) {
    exact = store_.Base(PageKind::kExact) + touched.page.exact * store_.RecordBytes(PageKind::kExact) +
            (is_key ? scheme.ExactKCell(head) : scheme.ExactVCell(head));
    exact_planes.row_bytes = int64_t{2} * head_dim;
    exact_planes.bytes = scheme.ExactCellBytes();
  }

  RowBuffer buffer;
  alignas(64) float x[kMaxHeadDim];
  EncodeCounts counts;
  for (int slot = touched.first_slot; slot < touched.last_slot; ++slot) {
    const float* row = rows + (slot - touched.first_slot) * stride;
    for (int c = 0; c < head_dim; ++c) x[c] = mean ? row[c] - mean[c] : row[c];
    if (side.hadamard) formats::Hadamard(x, head_dim);
    const formats::Format& format = exact ? exact_format : *side.format;
    format.encode_row(x, head_dim, static_scale, buffer.Planes(), counts);
    formats::StoreRow(kind, format, scheme.shape, exact ? exact_planes : side.planes, slot, buffer.Planes(),
                      exact ? exact : quantized);
  }
  if (exact && quantized && touched.last_slot == scheme.shape.tokens) {
    EncodeCounts closing;
    for (int slot = 0; slot < scheme.shape.tokens; ++slot) {
      formats::LoadRow(kind, exact_format, scheme.shape, exact_planes, slot, exact, buffer.Planes());
      exact_format.decode_row(buffer.Planes(), head_dim, 1.0f, x);
      side.format->encode_row(x, head_dim, static_scale, buffer.Planes(), closing);
      formats::StoreRow(kind, *side.format, scheme.shape, side.planes, slot, buffer.Planes(), quantized);
    }
    counts.saturated += closing.saturated;  // values and NaN were counted when they were written
  }
  LayerCounts& total = counts_[static_cast<size_t>(layer)];
  (is_key ? total.k : total.v).Add(counts);
}

}  // namespace kvanta::attention
