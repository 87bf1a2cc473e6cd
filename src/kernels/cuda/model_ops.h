// Arguments of a model's operations on a GPU (semantics: kernels/ops.h): plain data, the same for nvcc, the emulation
// and the host. All pointers are to device memory.
#pragma once

#include <cstdint>
#include <variant>

#include "base/math.h"
#include "kernels/activation.h"
#include "kernels/attention/cuda/sparse_ops.h"
#include "kernels/compression/cuda/compressor_ops.h"
#include "kernels/cuda/types.h"
#include "kernels/hyper_connections/cuda/stream_ops.h"
#include "kernels/linear/cuda/packed_rows.h"
#include "kernels/linear/linear.h"
#include "kernels/linear_attention/cuda/recurrent_ops.h"
#include "kernels/moe/moe_layer.h"
#include "kernels/pointwise.h"
#include "kernels/rope_kind.h"
#include "kernels/sampling/sample_params.h"
#include "parallel/communicator.h"

namespace kvanta::kernels::cuda {

// ---- weights

// W in panels of 16 rows, the last ones zero-padded; or f32 [out][in] if `panels` is false.
struct Weight {
  const uint8_t* data = nullptr;
  const float* bias = nullptr;  // [out], or null
  int64_t in = 0;
  int64_t out = 0;
  PanelKind kind = PanelKind::kBf16;
  bool panels = true;
  // Place of scales that are apart after `data`, and that of factors of scales, in bytes; and log2 of the units
  // that share a scale or, where there are such, factors.
  int64_t scales_at = 0;
  int64_t factors_at = 0;
  int32_t group_shift = 0;

  constexpr int64_t Units() const { return CeilDiv(in, kPanelChannels); }
};

// ---- operations

// Rows ids[r] - id of the table, for those that it has; without ids, the single row `id`.
struct EmbedOp {
  Weight table;
  const int32_t* ids = nullptr;  // [rows]
  int64_t id = 0;
  int64_t rows = 0;
  float* out = nullptr;  // f32 [rows][in]
};

// out[r] = x[r][parts.RankOf(ids[r])]: f32 [rows][parts.ranks][width] -> [rows][width].
struct PickPartsOp {
  const float* x = nullptr;
  parallel::Partition parts;
  const int32_t* ids = nullptr;
  int64_t rows = 0;
  int64_t width = 0;
  float* out = nullptr;
};

// Columns that ranks have computed, side by side: out[r] is rank after rank the row r of its part, f32
// [rows][columns.count]. x: each rank's dense [rows][columns of it], `rank_stride` floats apart.
struct JoinColumnsOp {
  const float* x = nullptr;
  int64_t rank_stride = 0;
  parallel::Partition columns;
  int64_t rows = 0;
  float* out = nullptr;
};

// RMSNorm, or LayerNorm if `subtracts_mean`.
struct NormOp {
  const float* x = nullptr;
  int64_t x_stride = 0;
  const float* weight = nullptr;
  const float* bias = nullptr;  // [width], or null
  bool subtracts_mean = false;
  float eps = 0;
  int64_t rows = 0;
  int64_t width = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
};

// out[r] = x[ids[r]], or x[r] without ids.
struct CopyOp {
  const float* x = nullptr;
  int64_t x_stride = 0;
  const int64_t* ids = nullptr;
  int64_t rows = 0;
  int64_t width = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
};

// x += y, or, with a gate, x[r] += y[r] * sigmoid(gate[r]) for rows of `width` values.
struct AddOp {
  float* x = nullptr;
  const float* y = nullptr;
  int64_t count = 0;
  const float* gate = nullptr;
  int64_t width = 0;
};

struct RopeOp {
  float* x = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;
  int32_t rotary_dim = 0;
  RopeKind kind = {};
  const float* cos_sin = nullptr;
  const int64_t* positions = nullptr;
};

struct ActivateMulOp {
  Activation activation = Activation::kSilu;
  float limit = 0;  // 0: none
  const float* gate_up = nullptr;
  int64_t rows = 0;
  int64_t width = 0;
  float* out = nullptr;
};

// x = activation(x).
struct ActivateOp {
  Pointwise activation = Pointwise::kSquaredRelu;
  Xielu xielu = {};
  float* x = nullptr;
  int64_t count = 0;
};

// x[r][i] *= by[r][i / channels], or function(by[r][i / channels]), for rows of `width` values.
struct MulOp {
  float* x = nullptr;
  int64_t x_stride = 0;
  const float* by = nullptr;
  int64_t by_stride = 0;
  bool by_gate = false;  // by function(by)
  GateFunction function = GateFunction::kSigmoid;
  int64_t rows = 0;
  int64_t width = 0;
  int64_t channels = 1;
};

// x *= factor, or, for rows of `width` values, x[r] *= factors[positions[r]], without positions factors[r], without
// factors `factor`.
struct ScaleOp {
  float* x = nullptr;
  float factor = 1;
  int64_t count = 0;
  const float* factors = nullptr;
  const int64_t* positions = nullptr;
  int64_t stride = 0;
  int64_t width = 0;
};

// x = min(x, limit), for rows of `width` values.
struct CutOffOp {
  float* x = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t width = 0;
  float limit = 0;
};

struct SoftcapOp {
  float* x = nullptr;
  float softcap = 0;
  int64_t count = 0;
};

// Rows of several layers, layer after layer: `padded_rows` each (whole tiles), of which the first `used_rows` are
// computed.
struct GroupedRows {
  int64_t padded_rows = 0;  // 0: rows of one layer, all used
  int64_t used_rows = 0;
};

// Packs rows of x for a weight of `kind`.
struct PackOp {
  const float* x = nullptr;  // f32 [rows][in]
  int64_t x_stride = 0;
  int64_t x_member_stride = 0;  // between the layers of `grouped`
  GroupedRows grouped = {};
  int64_t rows = 0;
  int64_t in = 0;
  PanelKind kind = PanelKind::kBf16;
  PackedRows out;
};

// x += y unless null, then the RMS norm of x; dense rows.
struct AddNormOp {
  float* x = nullptr;
  const float* y = nullptr;
  const float* weight = nullptr;
  float eps = 0;
  int64_t rows = 0;
  int64_t width = 0;
  float* out = nullptr;
  PackTarget pack;
};

// Packs what ActivateMulOp would store.
struct ActivatePackOp {
  ActivateMulOp activate;
  PackTarget pack;
};

// Output tile of a block: panels of W x tiles of 8 rows. k2x1: of gated outputs alone.
enum class ProductTile : uint8_t { k1x1, k2x1, k2x4, k4x8, k8x16 };

constexpr int PanelsOf(ProductTile tile) {
  constexpr int kPanels[] = {1, 2, 2, 4, 8};
  return kPanels[static_cast<int>(tile)];
}
constexpr int RowTilesOf(ProductTile tile) {
  constexpr int kTiles[] = {1, 1, 4, 8, 16};
  return kTiles[static_cast<int>(tile)];
}
constexpr int RowsOf(ProductTile tile) {
  return RowTilesOf(tile) * kRowTile;
}

// ActivateMulOp in place of y: of gates and of what they multiply, in rows [0, width) and
// [width, 2 width) of W.
struct GatedOutput {
  int64_t width = 0;  // a multiple of kPanelRows; 0: y
  Activation activation = Activation::kSilu;
  float limit = 0;
  float* out = nullptr;  // f32 [rows][width], unless pairs are packed
  // For the linear layer that reads them: pairs of channels, or, with a counter, 0 before and after, whole rows by the
  // last block.
  PackTarget pack = {};
  uint32_t* finished_blocks = nullptr;
};

struct LinearOp {
  Weight weight;
  ProductTile tile = ProductTile::k1x1;
  PackedRows x;                  // for packed weights
  const float* x_f32 = nullptr;  // for f32 weights: f32 [rows][in]
  int64_t rows = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
  GatedOutput gated = {};
  // Grouped layers, whose weights differ in `data` and bias only: those of each layer. A tile's layer comes from
  // tile_members (-1: skip the tile) or `grouped`.
  const uint8_t* const* group = nullptr;
  const float* const* group_bias = nullptr;  // null: no biases
  const int32_t* tile_members = nullptr;
  GroupedRows grouped = {};
  int64_t y_member_stride = 0;
};

// Logits of all experts but those of the rows' tokens become -infinity.
struct KeepExpertsOp {
  float* logits = nullptr;  // f32 [rows][experts]
  int64_t rows = 0;
  int32_t experts = 0;
  const int32_t* tokens = nullptr;            // [rows]
  const int32_t* experts_of_token = nullptr;  // [vocab][of_token]
  int32_t of_token = 0;
};

// MoE routing: each row's top_k experts, ascending, and their weights, [rows][top_k].
struct TopKOp {
  const float* logits = nullptr;  // f32 [rows][experts]
  int64_t rows = 0;
  MoeConfig moe;
  const float* e_score_correction_bias = nullptr;  // [experts], or null
  const float* per_expert_scale = nullptr;         // [experts], or null
  int32_t* experts = nullptr;
  float* weights = nullptr;
};

// MoE permutation: orders (row, expert) pairs by expert, padded so that each tile of rows has one expert.
struct PermuteOp {
  const int32_t* experts = nullptr;  // TopKOp's
  const float* weights = nullptr;    // TopKOp's
  int64_t rows = 0;
  int32_t expert_count = 0;
  int32_t top_k = 0;
  int32_t tile_rows = 0;
  int32_t max_tiles = 0;
  int32_t* permuted_rows = nullptr;  // [rows][top_k]: index of each pair's permuted row
  int64_t* source_rows = nullptr;    // [max_tiles * tile_rows]: source of each permuted row; any row for padding
  float* row_weights = nullptr;      // [max_tiles * tile_rows]: weight of each permuted row, 0 for padding; or null
  int32_t* tile_experts = nullptr;   // [max_tiles]: LinearOp's tile_members
};

// MoE combination: out[r] = sum over i of expert_out[permuted_rows[r][i]] * weights[r][i]. Experts of weight 0 add
// nothing.
struct CombineOp {
  const float* expert_out = nullptr;  // f32 [permuted rows][width]
  const int32_t* permuted_rows = nullptr;
  const float* weights = nullptr;
  bool weighted_before = false;  // the weights multiplied the experts' inputs: outputs are summed as they are
  int64_t rows = 0;
  int32_t top_k = 0;
  int64_t width = 0;
  float* out = nullptr;
};

struct ArgmaxOp {
  const float* x = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t width = 0;
  RowArgmax* argmaxes = nullptr;
};

struct SampleOp {
  const float* logits = nullptr;  // f32 [rows][width]
  int64_t rows = 0;
  int64_t width = 0;
  const RowArgmax* argmaxes = nullptr;
  const SampleParams* params = nullptr;
  int32_t* tokens = nullptr;
};

using ModelOp = std::variant<EmbedOp, PickPartsOp, JoinColumnsOp, NormOp, AddNormOp, ActivatePackOp, CopyOp, AddOp,
                             RopeOp, ActivateMulOp, ActivateOp, MulOp, ScaleOp, CutOffOp, SoftcapOp, PackOp, LinearOp,
                             KeepExpertsOp, TopKOp, PermuteOp, CombineOp, CausalConvOp, StateScanOp, GatedNormOp,
                             MakeEntriesOp, KeepInputsOp, StreamWeightsOp, CollapseStreamsOp, ExpandStreamsOp, ArgmaxOp,
                             SampleOp, ScoreTokensOp, ChooseTokensOp, GatherTokensOp, GatherRowsOp>;

}  // namespace kvanta::kernels::cuda
