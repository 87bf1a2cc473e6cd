// Linear layers on a GPU; weights are packed into panels on the host (fragment_layout.h) and uploaded once.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "base/thread_pool.h"
#include "kernels/cuda/cuda_context.h"
#include "kernels/linear/cuda/panel_writer.h"
#include "kernels/linear/linear.h"

namespace kvanta::kernels {

// Rows of x packed per launch; a multiple of every tile.
inline constexpr int64_t kRowBlock = 2048;
// Rows of gated outputs that are packed by the launch that computes them: by its blocks, or whole ones by its last
// block.
inline constexpr int64_t kMaxGatedRows = 256;
inline constexpr int64_t kMaxGatedWholeRows = 8;

// Workspace of MoE layers (gpu_experts.h, model_ops.h).
struct ExpertBuffers {
  Buffer experts, weights, permuted_rows, source_rows, tile_experts;
  Buffer row_weights;           // f32 [permuted rows]
  Buffer rows, gate_up, gated;  // f32 [permuted rows][...]
  Buffer own_gated, sums;       // f32 [permuted rows][...] and [rows][...] of this rank
};

// Shared by the layers of one Ops; their launches are in one stream.
struct GpuLinearContext {
  std::shared_ptr<CudaContext> gpu;
  std::shared_ptr<ThreadPool> threads;  // for packing weights
  // cuda::PackedRows, large enough for every layer: Forward does not allocate.
  Buffer codes = {}, unit_sums = {}, factors = {};
  // ... for outputs that are packed while `codes` are read, and the counter of blocks.
  Buffer gated_codes = {}, gated_unit_sums = {}, gated_factors = {}, finished_blocks = {};
  ExpertBuffers experts = {};
  Buffer f32_rows = {};  // rows of one layer of a group with f32 weights

  // Rows that an operation has packed for the layer that reads them next (Ops::AddRmsNorm).
  struct Prepacked {
    const Linear* reader = nullptr;
    const float* x = nullptr;
    int64_t rows = 0;
    cuda::PackedRows operands = {};
  };
  Prepacked prepacked = {};

  cuda::PackedRows Gated() const noexcept {
    return {
        .codes = gated_codes.data(), .unit_sums = gated_unit_sums.as<float>(), .factors = gated_factors.as<float>()};
  }
  // For packing other rows.
  cuda::PackedRows Packed() noexcept {
    prepacked = {};
    return {.codes = codes.data(), .unit_sums = unit_sums.as<float>(), .factors = factors.as<float>()};
  }
};

// Ops::ForwardGated.
struct GatedForward {
  Activation activation = Activation::kSilu;
  float limit = 0;
  float* out = nullptr;
  const Linear* reader = nullptr;
};

class GpuLinear final : public Linear {
 public:
  // Throws InputError, ResourceError.
  GpuLinear(std::shared_ptr<GpuLinearContext> context, std::span<const weights::WeightView> stacked,
            std::span<const float> bias, LinearKind kind);
  // Weights of one format, which PanelKindOf() knows, with columns in order.
  GpuLinear(std::shared_ptr<GpuLinearContext> context, std::span<const weights::QuantizedView> stacked,
            std::span<const float> bias, const weights::KernelFormat& format);

  int64_t In() const noexcept override { return weight_.in; }
  int64_t Out() const noexcept override { return weight_.out; }
  void Forward(const float* x, int64_t rows, float* y, int64_t y_stride, RowArgmax* argmaxes) const noexcept override;
  void DequantizeRow(int64_t index, float* out) const noexcept override;
  int64_t WeightBytes() const noexcept override { return weight_bytes_; }
  std::string_view Kind() const noexcept override;

  // Gates and what they multiply by one launch; false, and nothing is launched, where it takes two.
  bool ForwardGated(const float* x, int64_t rows, const GatedForward& gated) const noexcept;

  const cuda::Weight& weight() const noexcept { return weight_; }
  // Target for the operation that computes rows x: Forward then does not pack them.
  cuda::PackTarget Prepack(const float* x, int64_t rows) const noexcept;
  // True if parts of a row can be packed one by one: bf16 operands have no scale of a row.
  bool PacksParts() const noexcept {
    return weight_.kind == cuda::PanelKind::kBf16 && weight_.in % cuda::kPanelChannels == 0;
  }

 private:
  void PackUnquantized(std::span<const weights::WeightView> stacked);
  void UploadBias(std::span<const float> bias);
  void PackPanels(const std::function<cuda::RowSource(int64_t row)>& row_of);
  void ReserveRows();
  cuda::ProductTile TileFor(int64_t rows) const noexcept;
  cuda::PackTarget Target(const float* x, int64_t rows, const cuda::PackedRows& operands) const noexcept;
  cuda::PackedRows Pack(const float* x, int64_t rows) const noexcept;

  std::shared_ptr<GpuLinearContext> context_;
  cuda::Weight weight_;
  int64_t weight_bytes_ = 0;
  Buffer data_, bias_;
};

// Prepack of a linear layer that reads rows x; no target without one, or for one of several storages.
cuda::PackTarget Prepack(const Linear* reader, const float* x, int64_t rows) noexcept;
// The same for operations whose blocks pack parts of rows.
cuda::PackTarget PrepackParts(const Linear* reader, const float* x, int64_t rows) noexcept;

}  // namespace kvanta::kernels
