#include "kernels/moe/cuda/gpu_experts.h"

#include <algorithm>
#include <utility>

#include "kernels/linear/cuda/gpu_linear_group.h"

namespace kvanta::kernels {
namespace {

using cuda::ProductTile;

// Rows that go through the layer together: as many as are packed at once.
constexpr int64_t kMaxRows = kRowBlock;

std::vector<std::unique_ptr<Linear>> Take(std::vector<ExpertWeights>& experts,
                                          std::unique_ptr<Linear> ExpertWeights::*layer) {
  std::vector<std::unique_ptr<Linear>> layers;
  for (ExpertWeights& expert : experts) layers.push_back(std::move(expert.*layer));
  return layers;
}

class GpuExperts final : public ExpertLayer {
 public:
  GpuExperts(std::shared_ptr<GpuLinearContext> context, std::vector<ExpertWeights> experts, const MoeConfig& moe,
             std::span<const float> e_score_correction_bias)
      : context_(std::move(context)),
        moe_(moe),
        gate_up_(context_, Take(experts, &ExpertWeights::gate_up)),
        down_(context_, Take(experts, &ExpertWeights::down)) {
    Device& device = context_->gpu->device();
    if (!e_score_correction_bias.empty()) {
      correction_ = device.Allocate(e_score_correction_bias.size_bytes());
      device.CopyIn(correction_.data(), e_score_correction_bias.data(), e_score_correction_bias.size_bytes());
    }
    int64_t tiles = 0, slots = 0;
    for (int64_t rows = 1; rows <= kMaxRows; ++rows) {
      tiles = std::max(tiles, TilesOf(rows));
      slots = std::max(slots, TilesOf(rows) * cuda::RowsOf(TileFor(rows)));
    }
    const auto reserve = [&](Buffer& buffer, int64_t values, size_t bytes) {
      const size_t requested = static_cast<size_t>(values) * bytes;
      if (buffer.bytes() < requested) buffer = device.Allocate(requested);
    };
    ExpertBuffers& buffers = context_->experts;
    reserve(buffers.experts, kMaxRows * moe.num_experts_per_tok, sizeof(int32_t));
    reserve(buffers.weights, kMaxRows * moe.num_experts_per_tok, sizeof(float));
    reserve(buffers.row_slots, kMaxRows * moe.num_experts_per_tok, sizeof(int32_t));
    reserve(buffers.slot_rows, slots, sizeof(int64_t));
    reserve(buffers.tile_experts, tiles, sizeof(int32_t));
    reserve(buffers.rows, slots * gate_up_.In(), sizeof(float));
    reserve(buffers.both, slots * gate_up_.Out(), sizeof(float));
    reserve(buffers.gated, slots * down_.In(), sizeof(float));
  }

  void Forward(const float* x, const float* logits, int64_t rows, float* out) noexcept override {
    for (int64_t row = 0; row < rows; row += kMaxRows) {
      Mix(x + row * gate_up_.In(), logits + row * moe_.num_experts, std::min(kMaxRows, rows - row),
          out + row * down_.Out());
    }
  }

 private:
  // Tiles change no bit; large ones read an expert's W less often, where it has as many rows.
  ProductTile TileFor(int64_t rows) const noexcept {
    return rows * moe_.num_experts_per_tok > cuda::kRowTile * moe_.num_experts ? ProductTile::k2x4 : ProductTile::k1x1;
  }
  // At most, wherever the rows go: each expert's last tile may be nearly empty, and none is without a row.
  int64_t TilesOf(int64_t rows) const noexcept {
    const int64_t entries = rows * moe_.num_experts_per_tok;
    return std::min(entries, entries / cuda::RowsOf(TileFor(rows)) + moe_.num_experts);
  }

  void Mix(const float* x, const float* logits, int64_t rows, float* out) noexcept {
    CudaContext& gpu = *context_->gpu;
    const ExpertBuffers& buffers = context_->experts;
    const ProductTile tile = TileFor(rows);
    const int64_t tiles = TilesOf(rows), slots = tiles * cuda::RowsOf(tile);
    auto* const experts = buffers.experts.as<int32_t>();
    auto* const weights = buffers.weights.as<float>();
    auto* const row_slots = buffers.row_slots.as<int32_t>();
    auto* const slot_rows = buffers.slot_rows.as<int64_t>();
    auto* const tile_experts = buffers.tile_experts.as<int32_t>();
    auto* const made = buffers.rows.as<float>();  // first the gathered rows
    gpu.Run(cuda::RouteWork{.logits = logits,
                            .rows = rows,
                            .moe = moe_,
                            .e_score_correction_bias = correction_.bytes() == 0 ? nullptr : correction_.as<float>(),
                            .experts = experts,
                            .weights = weights});
    gpu.Run(cuda::SlotWork{.experts = experts,
                           .rows = rows,
                           .count = moe_.num_experts,
                           .chosen = moe_.num_experts_per_tok,
                           .tile_rows = cuda::RowsOf(tile),
                           .tiles = static_cast<int32_t>(tiles),
                           .row_slots = row_slots,
                           .slot_rows = slot_rows,
                           .tile_experts = tile_experts});
    gpu.Run(cuda::CopyWork{.x = x,
                           .x_stride = gate_up_.In(),
                           .ids = slot_rows,
                           .rows = slots,
                           .width = gate_up_.In(),
                           .out = made,
                           .out_stride = gate_up_.In()});
    gate_up_.Multiply(made, slots, tile, tile_experts, buffers.both.as<float>());
    gpu.Run(cuda::GateWork{.activation = moe_.activation,
                           .gate_up = buffers.both.as<float>(),
                           .rows = slots,
                           .width = down_.In(),
                           .out = buffers.gated.as<float>()});
    down_.Multiply(buffers.gated.as<float>(), slots, tile, tile_experts, made);
    gpu.Run(cuda::MixWork{.made = made,
                          .row_slots = row_slots,
                          .weights = weights,
                          .rows = rows,
                          .chosen = moe_.num_experts_per_tok,
                          .width = down_.Out(),
                          .out = out});
  }

  std::shared_ptr<GpuLinearContext> context_;
  const MoeConfig moe_;
  GpuLinearGroup gate_up_, down_;
  Buffer correction_;
};

}  // namespace

std::unique_ptr<ExpertLayer> MakeGpuExperts(std::shared_ptr<GpuLinearContext> context,
                                            std::vector<ExpertWeights> experts, const MoeConfig& moe,
                                            std::span<const float> e_score_correction_bias) {
  return std::make_unique<GpuExperts>(std::move(context), std::move(experts), moe, e_score_correction_bias);
}

}  // namespace kvanta::kernels
