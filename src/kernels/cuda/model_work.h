// What the kernels of a model's operations are told (kernels/ops.h says what they compute): plain data, the same for
// nvcc, for the emulation and for who fills it in. All pointers are of device memory.
#pragma once

#include <cstdint>
#include <variant>

#include "kernels/activation.h"
#include "kernels/attention/cuda/launch_shape.h"
#include "kernels/linear/linear.h"
#include "kernels/moe/moe_layer.h"
#include "kernels/sampling/sample_params.h"

namespace kvanta::kernels::cuda {

// ---- weights

inline constexpr int kPanelOuts = 16;      // rows of W of a panel: a product's M
inline constexpr int kPanelChannels = 32;  // channels that are loaded at once, and share a scale where there is one
inline constexpr int kRowTile = 8;         // rows of x of a product's N

// How W lies in the memory (weight_panels.h).
enum class PanelKind : uint8_t { kBf16, kF16, kInt8, kInt4 };

// W in panels of 16 rows, the last ones padded with zeros; or f32 [out][in] where `panels` is false.
struct Weight {
  const uint8_t* data = nullptr;
  const float* bias = nullptr;  // [out], or none
  int64_t in = 0;
  int64_t out = 0;
  PanelKind kind = PanelKind::kBf16;
  bool panels = true;

  constexpr int64_t Units() const { return (in + kPanelChannels - 1) / kPanelChannels; }
};

// Rows of x as the B operands of products, in 16 bits: [rows / 8][units][32 lanes][16 bytes].
struct PackedRows {
  uint8_t* codes = nullptr;
  float* unit_sums = nullptr;  // [rows / 8][units][8]: sums of the codes, where they are f16
  float* factors = nullptr;    // [rows]: x is the codes times a power of two
};

// ---- operations

struct EmbedWork {
  Weight table;
  const int32_t* ids = nullptr;  // [rows]; none: the one row `id`
  int64_t id = 0;
  int64_t rows = 0;
  float* out = nullptr;  // f32 [rows][in]
};

struct NormWork {
  const float* x = nullptr;
  int64_t x_stride = 0;
  const float* weight = nullptr;
  float eps = 0;
  int64_t rows = 0;
  int64_t width = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
};

// out[r] = x[ids[r]], or x[r] without ids.
struct CopyWork {
  const float* x = nullptr;
  int64_t x_stride = 0;
  const int64_t* ids = nullptr;
  int64_t rows = 0;
  int64_t width = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
};

struct AddWork {
  float* x = nullptr;
  const float* y = nullptr;
  int64_t count = 0;
};

struct RopeWork {
  float* x = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;
  int32_t rotary_dim = 0;
  const float* cos_sin = nullptr;
  const int64_t* positions = nullptr;
};

struct ScaleWork {
  float* x = nullptr;
  float factor = 1;
  int64_t count = 0;
};

struct SoftcapWork {
  float* x = nullptr;
  float softcap = 0;
  int64_t count = 0;
};

struct GateWork {
  Activation activation = Activation::kSilu;
  const float* gate_up = nullptr;
  int64_t rows = 0;
  int64_t width = 0;
  float* out = nullptr;
};

// Rows of several layers, one layer after the other: `rows` of each, whole tiles, of which the first `used` are wanted.
struct GroupedRows {
  int64_t rows = 0;  // 0: of one layer, and all are
  int64_t used = 0;
};

// Rows of x for a weight of `kind`.
struct PackWork {
  const float* x = nullptr;  // f32 [rows][in]
  int64_t x_stride = 0;
  int64_t x_member = 0;
  GroupedRows members = {};
  int64_t rows = 0;
  int64_t in = 0;
  PanelKind kind = PanelKind::kBf16;
  PackedRows out;
};

// What a block computes: panels of W times tiles of 8 rows.
enum class ProductTile : uint8_t { k1x1, k2x4, k4x8 };

constexpr int PanelsOf(ProductTile tile) {
  return tile == ProductTile::k1x1 ? 1 : tile == ProductTile::k2x4 ? 2 : 4;
}
constexpr int RowTilesOf(ProductTile tile) {
  return tile == ProductTile::k1x1 ? 1 : tile == ProductTile::k2x4 ? 4 : 8;
}
constexpr int RowsOf(ProductTile tile) {
  return RowTilesOf(tile) * kRowTile;
}

struct LinearWork {
  Weight weight;
  ProductTile tile = ProductTile::k1x1;
  PackedRows x;                  // of panels
  const float* plain = nullptr;  // of f32 weights: f32 [rows][in]
  int64_t rows = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
  // Of several layers, whose W are alike but for `data`, and without a bias: data of each; and which of them the rows
  // of a tile are of: tile_members, -1 where nobody wants the rows, or `members`.
  const uint8_t* const* group = nullptr;
  const int32_t* tile_members = nullptr;
  GroupedRows members = {};
  int64_t y_member = 0;
};

// A row's experts, ascending, and their weights, [rows][chosen].
struct RouteWork {
  const float* logits = nullptr;  // f32 [rows][count]
  int64_t rows = 0;
  MoeConfig moe;
  const float* e_score_correction_bias = nullptr;  // [count], or none
  int32_t* experts = nullptr;
  float* weights = nullptr;
};

// Slots for rows, so that a tile of slots has one expert.
struct SlotWork {
  const int32_t* experts = nullptr;  // RouteWork's
  int64_t rows = 0;
  int32_t count = 0;
  int32_t chosen = 0;
  int32_t tile_rows = 0;
  int32_t tiles = 0;                // room for so many
  int32_t* row_slots = nullptr;     // [rows][chosen]
  int64_t* slot_rows = nullptr;     // [tiles * tile_rows]; some row where nobody wants the slot
  int32_t* tile_experts = nullptr;  // [tiles]: LinearWork's tile_members
};

// out[r] = the sum over i of made[row_slots[r][i]] * weights[r][i].
struct MixWork {
  const float* made = nullptr;  // f32 [slots][width]
  const int32_t* row_slots = nullptr;
  const float* weights = nullptr;
  int64_t rows = 0;
  int32_t chosen = 0;
  int64_t width = 0;
  float* out = nullptr;
};

struct ArgmaxWork {
  const float* x = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t width = 0;
  RowArgmax* argmaxes = nullptr;
};

struct SampleWork {
  const float* logits = nullptr;  // f32 [rows][width]
  int64_t rows = 0;
  int64_t width = 0;
  const RowArgmax* argmaxes = nullptr;
  const SampleParams* draws = nullptr;
  int32_t* tokens = nullptr;
};

using ModelWork = std::variant<EmbedWork, NormWork, CopyWork, AddWork, RopeWork, GateWork, ScaleWork, SoftcapWork,
                               PackWork, LinearWork, RouteWork, SlotWork, MixWork, ArgmaxWork, SampleWork>;

}  // namespace kvanta::kernels::cuda
