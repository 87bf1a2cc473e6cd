// Matrix kernels of one ISA unit, one entry per storage of W.
//
// A step is 1 k (f32, f16), 2 (bf16: the pairs that vdpbf16ps multiplies), 32 or 256 (blocks: block_weight.h) or
// 128 (codes with scales apart: group_quant_layout.h). Packed W: panels of 16 columns (outputs), [ceil(out /
// 16)][steps][bytes of a step]; columns and k beyond W's shape are zero. Packed x: [blocks of steps][rows][x_stride
// bytes]. The stride is a constant of the kernel, so a tile's rows are at constant distances, and not a power of two,
// so they do not compete for the same cache sets.
//
// Every (row, column) is one chain of sums over k in ascending steps, then the bias: bit-identical for any tile, task
// or thread.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "kernels/linear/cpu/block_layout.h"
#include "weights/quantized_weight.h"

namespace kvanta::kernels {

// Steps of a layer, divided into blocks of at most `block_steps`, as evenly as whole steps allow.
struct StepBlocks {
  int64_t steps = 0;
  int64_t blocks = 0;

  static constexpr StepBlocks Of(int64_t steps, int64_t block_steps) { return {steps, CeilDiv(steps, block_steps)}; }
  constexpr int64_t First(int64_t block) const { return block * steps / blocks; }
};

// Product of all packed rows and a range of panels.
struct MultiplyTask {
  const uint8_t* x = nullptr;  // packed
  int64_t rows = 0;
  const uint8_t* w = nullptr;  // packed, all panels
  int64_t first_panel = 0;
  int64_t end_panel = 0;
  StepBlocks steps;
  int64_t out = 0;              // columns of W and of y
  const float* bias = nullptr;  // [out] or null
  float* y = nullptr;           // f32 [rows][out], row stride y_stride floats
  int64_t y_stride = 0;
};

struct PackTask {
  const float* x = nullptr;  // f32 [rows][k]
  int64_t rows = 0;
  int64_t k = 0;
  int64_t first_row = 0;
  int64_t end_row = 0;
  StepBlocks steps;
  const int32_t* order = nullptr;  // [k]: column of x that is packed as k; null: in order. Only for quantized weights
  uint8_t* out = nullptr;          // packed x
};

struct WeightKernels {
  int step_k = 0;       // k per step
  int block_steps = 0;  // maximum steps of a block: a panel's part that stays in the cache while row tiles pass over it
  int64_t block_rows = 0;        // maximum rows of x packed at a time
  int64_t tile_panels = 1;       // panels of a register tile of many rows
  int64_t x_stride = 0;          // bytes of a row in one block of packed x
  int64_t panel_step_bytes = 0;  // bytes of a panel per step
  void (*pack)(const PackTask& task) noexcept = nullptr;
  void (*multiply)(const MultiplyTask& task) noexcept = nullptr;
};

// Kernels of all formats of blocks (none for kNone); x in 8 bits, or in 16 (wide).
struct BlockKernels {
  WeightKernels of[weights::kBlockFormats][2];
};

// Kernels of codes with scales apart, by weights::kKernelFormats.
struct QuantizedKernels {
  WeightKernels of[weights::kKernelFormatCount];
};

struct LinearKernels {
  WeightKernels bf16;
  WeightKernels f32;
  WeightKernels f16;
  const BlockKernels* blocks = nullptr;
  const QuantizedKernels* quantized = nullptr;

  const WeightKernels& Of(weights::BlockFormat format, bool wide) const {
    return blocks->of[static_cast<int>(format)][wide ? 1 : 0];
  }
};

}  // namespace kvanta::kernels
