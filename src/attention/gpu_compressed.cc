#include "attention/gpu_compressed.h"

#include <algorithm>
#include <bit>

#include "base/math.h"

namespace kvanta::attention {
namespace {

using kernels::cuda::AttentionMetadata;
using kernels::cuda::AttentionParams;
using kernels::cuda::CompressedRow;
using kernels::cuda::CompressedStep;

// Entries and window of a query in layers of a shape, but for which entries are chosen.
CompressedRow RowOf(const CompressedShape& shape, int64_t position) {
  const int64_t first = std::max<int64_t>(0, position + 1 - shape.window);
  const int64_t entries = shape.row_tokens == 0 ? 0 : (position + 1) / shape.row_tokens;
  return {.entries = static_cast<int32_t>(shape.top_k == 0 ? entries : std::min<int64_t>(entries, shape.top_k)),
          .first_token = static_cast<int32_t>(first),
          .tokens = static_cast<int32_t>(position + 1 - first)};
}

}  // namespace

size_t GpuCompressed::AddLayer(const CompressedShape& shape, const formats::LayerScheme& scheme) {
  page_bytes_ = std::max(page_bytes_, scheme.HeadBytes());
  const size_t index = FindOrAdd(shape, shapes_);
  pages_.resize(shapes_.size(), 1);
  return index;
}

int64_t GpuCompressed::WaveRows(size_t shape) const noexcept {
  const WorkShape& work = shapes_[shape].work;
  const int64_t splits = CeilDiv(pages_[shape] * page_size_, int64_t{kSplitTokens});
  const int64_t result_rows = splits * TilesPerToken(work) * TileRowsOfToken(work);
  const int64_t fits = std::min(kCopyBytes / (pages_[shape] * page_bytes_), max_result_rows_ / result_rows);
  return std::clamp(fits, int64_t{1}, kMaxWaveRows);
}

// Makes room for `pages` of each row's copies, and waves of a step of `max_rows`.
void GpuCompressed::Reserve(size_t shape, int64_t pages, int64_t max_rows) {
  if (pages > pages_[shape]) {
    pages_[shape] = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(pages)));
    ++capacities_;
  }
  const int64_t rows = std::min(WaveRows(shape), max_rows), all = rows * pages_[shape];
  const auto grow = [&](Buffer& buffer, int64_t bytes) {
    const uint8_t* before = buffer.data();
    Grow(device_, buffer, bytes);
    if (buffer.data() != before) ++capacities_;
  };
  grow(copies_, all * page_bytes_);
  grow(gathered_, rows * int64_t{sizeof(cache::GatheredPages)});
  grow(page_ids_, all * int64_t{sizeof(kernels::cuda::PageIds)});
}

void GpuCompressed::MakePlan(const Batch& batch, int64_t bucket, const GpuSparsePlan* selected,
                             GpuCompressedPlan& plan) {
  const int page_size = page_size_;
  const auto pages_of = [&](const CompressedRow& row) { return CeilDiv(row.entries + row.tokens, page_size); };
  plan.shapes.resize(shapes_.size());
  plan.max_rows = bucket > 0 ? bucket : batch.rows;
  Batch copies;
  std::vector<int32_t> first_pages;
  for (size_t i = 0; i < shapes_.size(); ++i) {
    const CompressedShape& shape = shapes_[i];
    GpuCompressedPlan::Shape& of_shape = plan.shapes[i];
    of_shape.rows.clear();
    int64_t pages = 0;
    for (size_t s = 0; s < batch.sequences.size(); ++s) {
      const SequenceRows& sequence = batch.sequences[s];
      for (int64_t position = sequence.span.start; position < sequence.End(); ++position) {
        CompressedRow& row = of_shape.rows.emplace_back(RowOf(shape, position));
        row.sequence = static_cast<int32_t>(s);
        if (shape.top_k != 0) row.chosen = selected->IndexOf(std::ssize(of_shape.rows) - 1);
        pages = std::max(pages, pages_of(row));
      }
    }
    Reserve(i, pages, plan.max_rows);
    const int64_t wave_rows = WaveRows(i), waves = CeilDiv(plan.max_rows, wave_rows);
    of_shape.schedules.resize(static_cast<size_t>(waves));
    for (int64_t wave = 0; wave < waves; ++wave) {
      copies.sequences.clear();
      first_pages.clear();
      const int64_t end = std::min<int64_t>(std::ssize(of_shape.rows), (wave + 1) * wave_rows);
      for (int64_t row = wave * wave_rows; row < end; ++row) {  // as the last token of a sequence
        first_pages.push_back(static_cast<int32_t>(std::ssize(first_pages) * pages_[i]));
        const int64_t of_row = pages_of(of_shape.rows[static_cast<size_t>(row)]);
        copies.sequences.push_back({.span = {.start = of_row * page_size - 1, .tokens = 1}, .first_row = row});
      }
      GpuSchedule& schedule = of_shape.schedules[static_cast<size_t>(wave)];
      MakeGpuSchedule(shape.work, copies, first_pages, page_size, shape.partition, schedule);
      for (kernels::cuda::QueryTile& tile : schedule.tiles) {
        tile.gathered = static_cast<int32_t>(tile.page_table / pages_[i]);
      }
    }
  }
}

size_t GpuCompressed::HeaderBytes(GpuCompressedPlan& plan, size_t header) const noexcept {
  size_t end = header;
  for (GpuCompressedPlan::Shape& shape : plan.shapes) {
    shape.header = end;
    end += sizeof(CompressedStep) + shape.schedules.size() * kScheduleBytes;
  }
  return end - header;
}

void GpuCompressed::AddArrays(StepMetadata& metadata, GpuCompressedPlan& plan) const {
  for (GpuCompressedPlan::Shape& shape : plan.shapes) {
    shape.rows_offset = metadata.Add(shape.rows);
    shape.schedule_offsets.clear();
    for (const GpuSchedule& schedule : shape.schedules) AddSchedule(schedule, metadata, shape.schedule_offsets);
  }
}

void GpuCompressed::WriteHeader(StepMetadata& metadata, const GpuCompressedPlan& plan,
                                const GpuSplitResults& results) const {
  const uint8_t* const base = metadata.Address();
  for (const GpuCompressedPlan::Shape& shape : plan.shapes) {
    metadata.Write(shape.header,
                   CompressedStep{.rows = reinterpret_cast<const CompressedRow*>(base + shape.rows_offset),
                                  .count = static_cast<int32_t>(shape.rows.size())});
    WriteSchedules(shape.schedules, shape.schedule_offsets, page_ids_.as<kernels::cuda::PageIds>(), results,
                   shape.header + sizeof(CompressedStep), metadata);
  }
}

void GpuCompressed::Run(const GpuCompressedPlan& plan, const StepMetadata& metadata, const Layer& layer,
                        kernels::CudaContext& gpu) const noexcept {
  const CompressedShape& shape = shapes_[layer.shape];
  const GpuCompressedPlan::Shape& step = plan.shapes[layer.shape];
  const AttentionParams& params = layer.params;
  AttentionParams copies = params;
  copies.visibility = {};
  copies.quantized = {copies_.as<uint8_t>(), layer.scheme.HeadBytes()};
  copies.k.first_cell = 0;
  copies.gathered = gathered_.as<cache::GatheredPages>();
  kernels::cuda::GatherRowsOp gather{.step = reinterpret_cast<const CompressedStep*>(metadata.Address() + step.header),
                                     .selection = layer.selection,
                                     .pages = static_cast<int32_t>(pages_[layer.shape]),
                                     .top_k = shape.top_k,
                                     .page_size = params.page_size,
                                     .head_dim = params.head_dim,
                                     .bits = params.k_type.low_bits + params.k_type.high_bits,
                                     .scaling = params.k_type.scaling,
                                     .tokens = params.quantized,
                                     .copies = copies.quantized,
                                     .token_cell = params.k,
                                     .copy_cell = copies.k,
                                     .token_pages = params.metadata,
                                     .gathered = gathered_.as<cache::GatheredPages>(),
                                     .page_ids = page_ids_.as<kernels::cuda::PageIds>()};
  if (layer.entries != nullptr) {
    gather.row_tokens = shape.row_tokens;
    gather.page_entries = layer.entries->page_size;
    gather.entries = layer.entries->quantized;
    gather.entry_cell = layer.entries->k;
    gather.entry_pages = layer.entries->metadata;
  }
  const int64_t wave_rows = WaveRows(layer.shape);
  for (size_t wave = 0; wave < step.schedules.size(); ++wave) {
    const int64_t first = static_cast<int64_t>(wave) * wave_rows, rows = std::min(wave_rows, plan.max_rows - first);
    gather.first_row = static_cast<int32_t>(first);
    gather.max_rows = static_cast<int32_t>(rows);
    gpu.Run(gather);
    copies.metadata = reinterpret_cast<const AttentionMetadata*>(metadata.Address() + step.header +
                                                                 sizeof(CompressedStep) + wave * kScheduleBytes);
    copies.max_tiles = static_cast<int32_t>(rows * TilesPerToken(shape.work));
    copies.tile_rows = TileRowsOfToken(shape.work);
    gpu.Attend(layer.kernel, copies);
  }
}

}  // namespace kvanta::attention
