// A weight matrix as a checkpoint stores it.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/dtype.h"
#include "weights/block_format.h"

namespace kvanta::weights {

// Row-major [out][in], elements or blocks (then `in` is a multiple of their size).
struct WeightView {
  const void* data = nullptr;
  DType dtype = DType::kF32;  // type of the elements
  int64_t out = 0;
  int64_t in = 0;
  BlockFormat blocks = BlockFormat::kNone;
  std::string_view module = {};  // name in the checkpoint, for reports
  // Heads whose rows, from the `interleaved_first`-th of each on, are stored in the order of interleaved RoPE, (0,
  // half, 1, half + 1, ...), as GGUF's llama architecture and MLA have them; 0: rows are stored in order.
  int64_t interleaved_heads = 0;
  int64_t interleaved_first = 0;

  // Index in `data` of row `row`.
  int64_t StoredRow(int64_t row) const noexcept {
    if (interleaved_heads == 0) return row;
    const int64_t head_dim = out / interleaved_heads, half = (head_dim - interleaved_first) / 2;
    const int64_t channel = row % head_dim - interleaved_first;
    if (channel < 0) return row;
    return row - channel + channel % half * 2 + channel / half;
  }
  // Row `row` in `data`.
  const uint8_t* RowData(int64_t row) const noexcept {
    const int64_t bytes = blocks == BlockFormat::kNone ? in * SizeOf(dtype) : RowBytes(blocks, in);
    return static_cast<const uint8_t*>(data) + StoredRow(row) * bytes;
  }
  // Rows [first, first + count), whole heads where heads are interleaved.
  WeightView Rows(int64_t first, int64_t count) const noexcept {
    if (first == 0 && count == out) return *this;
    WeightView rows = *this;
    const int64_t bytes = blocks == BlockFormat::kNone ? in * SizeOf(dtype) : RowBytes(blocks, in);
    rows.data = static_cast<const uint8_t*>(data) + first * bytes;
    rows.interleaved_heads = interleaved_heads * count / out;
    rows.out = count;
    return rows;
  }
};

// Checks the weights of a layer, stacked along `out`, and its bias, [sum of out] or empty. Throws InputError.
void CheckWeights(std::span<const WeightView> stacked, std::span<const float> bias);

// Row `row` of the matrix as f32 [view.in], blocks dequantized. The data may be unaligned.
void ReadWeightRow(const WeightView& view, int64_t row, float* out) noexcept;

}  // namespace kvanta::weights
