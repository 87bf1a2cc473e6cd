#include "attention/gpu_sparse.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "attention/token_selector.h"
#include "base/math.h"

namespace kvanta::attention {
namespace {

using kernels::cuda::AttentionMetadata;
using kernels::cuda::AttentionParams;
using kernels::cuda::SparseStep;

constexpr int64_t kMaxScoreRows = 64;  // of a wave without copies

}  // namespace

GpuSparse::GpuSparse(const formats::CacheLayout& layout, const std::vector<AttentionSpec>& layers,
                     std::vector<GpuSparseShape> shapes, int64_t max_result_rows, Device& device)
    : shapes_(std::move(shapes)), device_(device), top_k_(TopkOf(layers)), page_size_(layout.page_size) {
  const auto full = static_cast<int32_t>(CeilDiv(top_k_, page_size_));
  quantized_pages_ = pages_ = full;
  int64_t quantized_bytes = 0, exact_bytes = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const formats::LayerScheme& scheme = layout.layers[i];
    if (scheme.keys_only) row_tokens_ = scheme.row_tokens;
    if (layers[i].index_topk == 0 || scheme.keys_only || scheme.shared_kv) continue;
    quantized_bytes = std::max(quantized_bytes, scheme.HeadBytes());
    if (!scheme.exact_open) continue;
    // Pages of each kind may be partly filled.
    pages_ = full + 2;
    exact_pages_ = std::max(exact_pages_, std::min(pages_, scheme.sink_pages + scheme.exact_pages));
    exact_bytes = std::max(exact_bytes, scheme.ExactHeadBytes());
  }
  quantized_bytes *= quantized_pages_;
  exact_bytes *= exact_pages_;
  int64_t result_rows = 1;
  for (const GpuSparseShape& shape : shapes_) {
    const int64_t splits = CeilDiv(int64_t{pages_} * page_size_, int64_t{kSplitTokens});
    result_rows = std::max(result_rows, splits * TilesPerToken(shape.work) * TileRowsOfToken(shape.work));
  }
  // Without copies, scores alone take memory.
  const int64_t bytes = shapes_.empty() ? kCopyBytes / kMaxScoreRows : quantized_bytes + exact_bytes;
  const int64_t fits = std::min(kCopyBytes / bytes, max_result_rows / result_rows);
  wave_rows_ = std::clamp(fits, int64_t{1}, kMaxWaveRows);
  if (shapes_.empty()) return;
  const auto allocate = [&](int64_t bytes_of_row) {
    return device_.Allocate(static_cast<size_t>(wave_rows_ * bytes_of_row));
  };
  quantized_ = allocate(quantized_bytes);
  if (exact_bytes != 0) exact_ = allocate(exact_bytes);
  gathered_ = allocate(sizeof(cache::GatheredPages));
  page_ids_ = allocate(pages_ * int64_t{sizeof(kernels::cuda::PageIds)});
}

size_t GpuSparse::ShapeOf(const WorkShape& work) const noexcept {
  return static_cast<size_t>(std::ranges::find(shapes_, work, &GpuSparseShape::work) - shapes_.begin());
}

void GpuSparse::MakePlan(const Batch& batch, int64_t bucket, GpuSparsePlan& plan) {
  if (!shapes_.empty()) plan.dense.sequences = DenseRows(batch, top_k_);
  plan.rows.clear();
  plan.bucket = bucket;
  int64_t longest = 0;
  for (size_t s = 0; s < batch.sequences.size(); ++s) {
    const SequenceRows& sequence = batch.sequences[s];
    const int64_t first = (int64_t{top_k_} + 1) * row_tokens_ - 1;  // sees more than top_k
    for (int64_t position = std::max(sequence.span.start, first); position < sequence.End(); ++position) {
      const int64_t seen = (position + 1) / row_tokens_;
      plan.rows.push_back({.sequence = static_cast<int32_t>(s),
                           .row = static_cast<int32_t>(sequence.first_row + position - sequence.span.start),
                           .position = static_cast<int32_t>(seen - 1)});
      longest = std::max(longest, seen);
    }
  }
  plan.max_rows = bucket > 0 ? bucket : std::ssize(plan.rows);
  plan.waves = CeilDiv(plan.max_rows, wave_rows_);
  plan.schedules.resize(static_cast<size_t>(plan.waves) * shapes_.size());
  Batch copies;
  std::vector<int32_t> first_pages;
  for (int64_t wave = 0; wave < plan.waves; ++wave) {
    copies.sequences.clear();
    first_pages.clear();
    const int64_t end = std::min<int64_t>(std::ssize(plan.rows), (wave + 1) * wave_rows_);
    for (int64_t row = wave * wave_rows_; row < end; ++row) {  // as the last token of a sequence
      first_pages.push_back(static_cast<int32_t>(std::ssize(first_pages)) * pages_);
      copies.sequences.push_back({.span = {.start = int64_t{pages_} * page_size_ - 1, .tokens = 1},
                                  .first_row = plan.rows[static_cast<size_t>(row)].row});
    }
    for (size_t i = 0; i < shapes_.size(); ++i) {
      GpuSchedule& schedule = plan.schedules[static_cast<size_t>(wave) * shapes_.size() + i];
      MakeGpuSchedule(shapes_[i].work, copies, first_pages, page_size_, shapes_[i].partition, schedule);
      for (kernels::cuda::QueryTile& tile : schedule.tiles) tile.gathered = tile.page_table / pages_;
    }
  }
  plan.score_stride = RoundUp(longest, int64_t{kSplitTokens});
  Grow(device_, plan.scores, std::min(wave_rows_, plan.max_rows) * plan.score_stride * int64_t{sizeof(float)});
  Grow(device_, plan.positions, plan.max_rows * top_k_ * int64_t{sizeof(int32_t)});
}

size_t GpuSparse::HeaderBytes(const GpuSparsePlan& plan) const noexcept {
  return sizeof(SparseStep) + plan.schedules.size() * kScheduleBytes;
}

void GpuSparse::AddArrays(StepMetadata& metadata, GpuSparsePlan& plan) const {
  plan.rows_offset = metadata.Add(plan.rows);
  plan.schedule_offsets.clear();
  for (const GpuSchedule& schedule : plan.schedules) {
    AddSchedule(schedule, metadata, plan.schedule_offsets);
  }
}

void GpuSparse::WriteHeader(StepMetadata& metadata, const GpuSparsePlan& plan, const GpuSplitResults& results) const {
  const uint8_t* const base = metadata.Address();
  metadata.Write(plan.header,
                 SparseStep{.rows = reinterpret_cast<const kernels::cuda::SparseRow*>(base + plan.rows_offset),
                            .count = static_cast<int32_t>(plan.rows.size()),
                            .score_stride = static_cast<int32_t>(plan.score_stride),
                            .scores = plan.scores.as<float>(),
                            .positions = plan.positions.as<int32_t>()});
  WriteSchedules(plan.schedules, plan.schedule_offsets, page_ids_.as<kernels::cuda::PageIds>(), results,
                 plan.header + sizeof(SparseStep), metadata);
}

kernels::cuda::SparseWave GpuSparse::WaveOf(const GpuSparsePlan& plan, const StepMetadata& metadata,
                                            int64_t wave) const noexcept {
  const int64_t first = wave * wave_rows_;
  return {.step = reinterpret_cast<const SparseStep*>(metadata.Address() + plan.header),
          .first_row = static_cast<int32_t>(first),
          .max_rows = static_cast<int32_t>(std::min(wave_rows_, plan.max_rows - first)),
          .top_k = top_k_};
}

void GpuSparse::Select(const GpuSparsePlan& plan, const StepMetadata& metadata, const AttentionParams& keys,
                       const float* weights, kernels::CudaContext& gpu) const noexcept {
  for (int64_t wave = 0; wave < plan.waves; ++wave) {
    kernels::cuda::ScoreTokensOp score{.wave = WaveOf(plan, metadata, wave), .keys = keys, .weights = weights};
    score.blocks = 2 * gpu.Multiprocessors();
    gpu.Run(score);
    gpu.Run(kernels::cuda::ChooseTokensOp{.wave = score.wave});
  }
}

void GpuSparse::Run(const GpuSparsePlan& plan, const StepMetadata& metadata, const formats::LayerScheme& scheme,
                    size_t shape, const AttentionParams& params, int kernel, kernels::CudaContext& gpu) const noexcept {
  // Records of copies have this layer alone.
  AttentionParams copies = params;
  copies.quantized = {quantized_.as<uint8_t>(), scheme.HeadBytes()};
  copies.k.first_cell = 0;
  copies.unquantized.first_cell -= params.k.first_cell;
  copies.exact_pages = {};
  copies.gathered = gathered_.as<cache::GatheredPages>();
  if (scheme.exact_open) {
    copies.exact = {exact_.as<uint8_t>(), scheme.ExactHeadBytes()};
    copies.exact_k.first_cell = 0;
    copies.exact_unquantized.first_cell -= params.exact_k.first_cell;
  }
  for (int64_t wave = 0; wave < plan.waves; ++wave) {
    const kernels::cuda::SparseWave rows = WaveOf(plan, metadata, wave);
    gpu.Run(kernels::cuda::GatherTokensOp{.wave = rows,
                                          .from = params,
                                          .to = copies,
                                          .pages = pages_,
                                          .quantized_pages = quantized_pages_,
                                          .exact_pages = exact_pages_,
                                          .gathered = gathered_.as<cache::GatheredPages>(),
                                          .page_ids = page_ids_.as<kernels::cuda::PageIds>()});
    const size_t index = static_cast<size_t>(wave) * shapes_.size() + shape;
    SetMetadata(ListsOf(plan.schedules[index], shapes_[shape].work, shapes_[shape].partition, plan.bucket),
                reinterpret_cast<const AttentionMetadata*>(metadata.Address() + plan.header + sizeof(SparseStep) +
                                                           index * kScheduleBytes),
                copies);
    copies.max_tiles = static_cast<int32_t>(rows.max_rows * TilesPerToken(shapes_[shape].work));
    copies.tile_rows = TileRowsOfToken(shapes_[shape].work);
    gpu.Attend(kernel, copies);
  }
}

int32_t GpuSparsePlan::IndexOf(int64_t row) const noexcept {
  const auto found = std::ranges::lower_bound(rows, row, {}, &kernels::cuda::SparseRow::row);
  return found == rows.end() || found->row != row ? -1 : static_cast<int32_t>(found - rows.begin());
}

std::span<const int32_t> GpuSparse::Selected(const GpuSparsePlan& plan, int64_t row) const noexcept {
  const int32_t index = plan.IndexOf(row);
  if (index < 0) return {};
  const int32_t* const from = plan.positions.as<int32_t>() + int64_t{index} * top_k_;
  try {
    plan.read.resize(static_cast<size_t>(top_k_));
    device_.CopyOut(plan.read.data(), from, plan.read.size() * sizeof(int32_t));
  } catch (const std::exception&) {  // a GPU's errors last: the next synchronization throws it
    return {};
  }
  return plan.read;
}

}  // namespace kvanta::attention
