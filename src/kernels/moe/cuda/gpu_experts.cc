#include "kernels/moe/cuda/gpu_experts.h"

#include <algorithm>
#include <utility>

#include "kernels/linear/cuda/gpu_linear_group.h"

namespace kvanta::kernels {
namespace {

using cuda::ProductTile;

// Rows per pass through the layer, which bound its buffers; a PackOp takes as many.
constexpr int64_t kMaxRows = 512;

std::vector<std::unique_ptr<Linear>> Take(std::vector<ExpertWeights>& experts,
                                          std::unique_ptr<Linear> ExpertWeights::*layer) {
  std::vector<std::unique_ptr<Linear>> layers;
  for (ExpertWeights& expert : experts) layers.push_back(std::move(expert.*layer));
  return layers;
}

class GpuExperts final : public ExpertLayer {
 public:
  GpuExperts(std::shared_ptr<GpuLinearContext> context, std::vector<ExpertWeights> experts, const MoeConfig& moe,
             const RouterVectors& router, const ExpertDivision& division)
      : context_(std::move(context)),
        moe_(moe),
        ranks_(division.Divided() ? *division.ranks : alone_),
        gate_up_(context_, Take(experts, &ExpertWeights::gate_up)),
        down_(context_, Take(experts, &ExpertWeights::down)),
        e_score_correction_bias_(Upload(router.e_score_correction_bias)),
        per_expert_scale_(Upload(router.per_expert_scale)) {
    Device& device = context_->gpu->device();
    int64_t tiles = 0, permuted = 0;
    for (int64_t rows = 1; rows <= kMaxRows; ++rows) {
      tiles = std::max(tiles, MaxTiles(rows));
      permuted = std::max(permuted, MaxTiles(rows) * cuda::RowsOf(TileFor(rows)));
    }
    const auto reserve = [&](Buffer& buffer, int64_t values, size_t bytes) {
      const size_t requested = static_cast<size_t>(values) * bytes;
      if (buffer.bytes() < requested) buffer = device.Allocate(requested);
    };
    ExpertBuffers& buffers = context_->experts;
    reserve(buffers.experts, kMaxRows * moe.num_experts_per_tok, sizeof(int32_t));
    reserve(buffers.weights, kMaxRows * moe.num_experts_per_tok, sizeof(float));
    reserve(buffers.permuted_rows, kMaxRows * moe.num_experts_per_tok, sizeof(int32_t));
    reserve(buffers.source_rows, permuted, sizeof(int64_t));
    if (moe.apply_router_weight_on_input) reserve(buffers.row_weights, permuted, sizeof(float));
    reserve(buffers.tile_experts, tiles, sizeof(int32_t));
    reserve(buffers.rows, permuted * gate_up_.In(), sizeof(float));
    if (moe.gated) reserve(buffers.gate_up, permuted * gate_up_.Out(), sizeof(float));
    reserve(buffers.gated, permuted * down_.In(), sizeof(float));
    if (ranks_.IsSingleRank()) return;
    reserve(buffers.own_gated, permuted * OwnWidth(), sizeof(float));
    reserve(buffers.sums, kMaxRows * down_.Out(), sizeof(float));
  }

  void Forward(const float* x, const float* logits, int64_t rows, float* out) noexcept override {
    for (int64_t row = 0; row < rows; row += kMaxRows) {
      ForwardBlock(x + row * gate_up_.In(), logits + row * moe_.num_experts, std::min(kMaxRows, rows - row),
                   out + row * gate_up_.In());
    }
  }

 private:
  // Channels of an expert that this rank computes.
  int64_t OwnWidth() const noexcept { return gate_up_.Out() / (moe_.gated ? 2 : 1); }
  Buffer Upload(std::span<const float> values) const {
    if (values.empty()) return {};
    Buffer buffer = context_->gpu->device().Allocate(values.size_bytes());
    context_->gpu->device().CopyIn(buffer.data(), values.data(), values.size_bytes());
    return buffer;
  }
  // The tile does not affect results; large tiles read an expert's W less often if it has enough rows.
  ProductTile TileFor(int64_t rows) const noexcept {
    return rows * moe_.num_experts_per_tok > cuda::kRowTile * moe_.num_experts ? ProductTile::k2x4 : ProductTile::k1x1;
  }
  // Upper bound over all routings: each expert's last tile may have a single row, and no tile is empty.
  int64_t MaxTiles(int64_t rows) const noexcept {
    const int64_t entries = rows * moe_.num_experts_per_tok;
    return std::min(entries, entries / cuda::RowsOf(TileFor(rows)) + moe_.num_experts);
  }

  void ForwardBlock(const float* x, const float* logits, int64_t rows, float* out) noexcept {
    CudaContext& gpu = *context_->gpu;
    const ExpertBuffers& buffers = context_->experts;
    const ProductTile tile = TileFor(rows);
    const int64_t tiles = MaxTiles(rows), permuted = tiles * cuda::RowsOf(tile);
    auto* const experts = buffers.experts.as<int32_t>();
    auto* const weights = buffers.weights.as<float>();
    auto* const permuted_rows = buffers.permuted_rows.as<int32_t>();
    auto* const source_rows = buffers.source_rows.as<int64_t>();
    auto* const tile_experts = buffers.tile_experts.as<int32_t>();
    auto* const expert_rows = buffers.rows.as<float>();  // input, later output
    gpu.Run(cuda::TopKOp{.logits = logits,
                         .rows = rows,
                         .moe = moe_,
                         .e_score_correction_bias = e_score_correction_bias_.as<float>(),
                         .per_expert_scale = per_expert_scale_.as<float>(),
                         .experts = experts,
                         .weights = weights});
    auto* const row_weights = moe_.apply_router_weight_on_input ? buffers.row_weights.as<float>() : nullptr;
    gpu.Run(cuda::PermuteOp{.experts = experts,
                            .weights = weights,
                            .rows = rows,
                            .expert_count = moe_.num_experts,
                            .top_k = moe_.num_experts_per_tok,
                            .tile_rows = cuda::RowsOf(tile),
                            .max_tiles = static_cast<int32_t>(tiles),
                            .permuted_rows = permuted_rows,
                            .source_rows = source_rows,
                            .row_weights = row_weights,
                            .tile_experts = tile_experts});
    gpu.Run(cuda::CopyOp{.x = x,
                         .x_stride = gate_up_.In(),
                         .ids = source_rows,
                         .rows = permuted,
                         .width = gate_up_.In(),
                         .out = expert_rows,
                         .out_stride = gate_up_.In()});
    if (row_weights != nullptr) {
      gpu.Run(cuda::ScaleOp{.x = expert_rows,
                            .count = permuted * gate_up_.In(),
                            .factors = row_weights,
                            .stride = gate_up_.In(),
                            .width = gate_up_.In()});
    }
    const bool is_whole = ranks_.IsSingleRank();
    auto* const gated = (is_whole ? buffers.gated : buffers.own_gated).as<float>();
    if (moe_.gated) {
      gate_up_.Multiply(expert_rows, permuted, tile, tile_experts, buffers.gate_up.as<float>());
      if (moe_.limits_gate) {
        gpu.Run(cuda::CutOffOp{.x = buffers.gate_up.as<float>(),
                               .stride = 2 * OwnWidth(),
                               .rows = permuted,
                               .width = OwnWidth(),
                               .limit = moe_.activation_limit});
      }
      gpu.Run(cuda::ActivateMulOp{.activation = moe_.activation,
                                  .limit = moe_.activation_limit,
                                  .gate_up = buffers.gate_up.as<float>(),
                                  .rows = permuted,
                                  .width = OwnWidth(),
                                  .out = gated});
    } else {
      gate_up_.Multiply(expert_rows, permuted, tile, tile_experts, gated);
      gpu.Run(cuda::ActivateOp{.activation = Pointwise::kSquaredRelu, .x = gated, .count = permuted * OwnWidth()});
    }
    if (!is_whole) {
      ranks_.AllGatherColumns(gated, permuted, ranks_.PartitionOf(down_.In()), buffers.gated.as<float>());
    }
    down_.Multiply(buffers.gated.as<float>(), permuted, tile, tile_experts, expert_rows);
    float* const sums = is_whole ? out : buffers.sums.as<float>();
    gpu.Run(cuda::CombineOp{.expert_out = expert_rows,
                            .permuted_rows = permuted_rows,
                            .weights = weights,
                            .weighted_before = moe_.apply_router_weight_on_input,
                            .rows = rows,
                            .top_k = moe_.num_experts_per_tok,
                            .width = down_.Out(),
                            .out = sums});
    if (!is_whole) ranks_.AllGatherColumns(sums, rows, ranks_.PartitionOf(gate_up_.In()), out);
  }

  std::shared_ptr<GpuLinearContext> context_;
  const MoeConfig moe_;
  parallel::Communicator alone_;
  parallel::Communicator& ranks_;
  GpuLinearGroup gate_up_, down_;
  const Buffer e_score_correction_bias_, per_expert_scale_;  // [num_experts], or empty
};

}  // namespace

std::unique_ptr<ExpertLayer> MakeGpuExperts(std::shared_ptr<GpuLinearContext> context,
                                            std::vector<ExpertWeights> experts, const MoeConfig& moe,
                                            const RouterVectors& router, const ExpertDivision& division) {
  return std::make_unique<GpuExperts>(std::move(context), std::move(experts), moe, router, division);
}

}  // namespace kvanta::kernels
