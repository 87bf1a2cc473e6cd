// Chunks of cells as operands of the tensor cores in shared memory: what a block decodes once, for all of its tiles.
// Include the primitives first.
#pragma once

#include "kernels/attention/cuda/row_state.h"
#include "kernels/attention/cuda/scores.h"
#include "kernels/attention/cuda/staged_cells.h"
#include "kernels/attention/cuda/weighted_values.h"

namespace kvanta::kernels::cuda {

inline constexpr int kCoreBytes = 128;  // of a core matrix

// Stores an A operand of a warp's product as a B operand of a warpgroup's: its rows are 16 columns.
KVANTA_DEVICE void StoreColumns(const CoreMatrices& to, int lane, const Vec4& operand) {
  const int word = lane / 8;  // whose row the lane stores
  StoreMatrices(to.offset + (word % 2 * to.n_stride + word / 2 * to.k_stride + lane % 8 * 16), operand);
}

// Lanes have the tokens and channels of codes.h. Scales are f32, zero points fp16 as in cells.
template <class KvType, bool kIsKey, int kHeadDim>
struct DecodedCell {
  static constexpr bool kIsStaged = true;
  static constexpr bool kIsDecoded = true;
  using Staged = StagedCell<KvType, kIsKey, kHeadDim>;
  static constexpr int kBlocks = BlocksOf(kHeadDim);
  static constexpr int kOperands = 4;  // A operands of a block of 32 channels
  static constexpr int kSectionBytes = kChunkTokens * 4;
  static constexpr int kOffsetSectionBytes = kChunkTokens * 2;
  static constexpr bool kScalesBlocks = HasBlockScales(KvType::BlockScaling());
  static constexpr bool kScalesTokens = KvType::TokenScaling() != formats::ScaleType::kNone;
  static constexpr int kScales = kScalesBlocks ? kBlocks : kScalesTokens ? 1 : 0;
  static_assert(!kScalesBlocks || !kScalesTokens);
  static constexpr int kScalesAt = kBlocks * kOperands * kWarp * 16;
  static constexpr int kOffsetsAt = kScalesAt + kScales * kSectionBytes;
  static constexpr int kLargestAt = kOffsetsAt + Staged::kOffsets * kOffsetSectionBytes;
  static constexpr int kBytes = kLargestAt + (kIsKey ? 0 : (4 * kScales + 15) / 16 * 16);

  int base;  // in shared memory

  KVANTA_DEVICE Vec4 Operand(int block, int index, int lane) const {
    return LoadShared<Vec4>(OperandAt(block, index, lane));
  }
  KVANTA_DEVICE void SetOperand(int block, int index, int lane, const Vec4& operand) const {
    StoreShared(OperandAt(block, index, lane), operand);
  }
  KVANTA_DEVICE Vec4 BlockFloats(int block, int token) const { return LoadShared<Vec4>(ScaleAt(block, token)); }
  KVANTA_DEVICE Vec4 TokenFloats(int token) const { return LoadShared<Vec4>(ScaleAt(0, token)); }
  KVANTA_DEVICE Vec2 BlockOffsets(int block, int token) const { return LoadShared<Vec2>(OffsetAt(block, token)); }
  KVANTA_DEVICE Vec2 TokenOffsets(int token) const { return LoadShared<Vec2>(OffsetAt(0, token)); }
  // The chunk's largest scale, of values, times `value_scale`.
  KVANTA_DEVICE float LargestScale(float value_scale) const {
    float largest = kScales == 0 ? fabsf(value_scale) : 0.0F;
    KVANTA_UNROLL
    for (int i = 0; i < kScales; ++i) largest = fmaxf(largest, LoadShared<float>(base + kLargestAt + 4 * i));
    return largest;
  }

  // Stores the scales and zero points of a block of 32 channels, those of tokens with block 0; by all lanes of a warp.
  KVANTA_DEVICE void DecodeScales(const KvType& type, const Staged& cell, int block, float value_scale,
                                  int lane) const {
    const int g = lane / 4;
    if (kScalesBlocks || (kScalesTokens && block == 0)) {
      float scales[4];
      if constexpr (kScalesBlocks) {
        BlockScales(type, cell, kHeadDim, block, g, scales);
      } else {
        TokenScales(type, cell, g, scales);
      }
      Vec4 vec;
      float largest = 0;
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) {
        vec.word[i] = std::bit_cast<uint32_t>(scales[i]);
        largest = fmaxf(largest, fabsf(scales[i]) * fabsf(value_scale));
      }
      if (lane % 4 == 0) StoreShared(ScaleAt(block, 4 * g), vec);
      if constexpr (!kIsKey) {
        largest = RowMaximum(largest);
        if (lane == 0) StoreShared(base + kLargestAt + 4 * block, largest);
      }
    }
    if (Staged::kOffsets != 0 && block < Staged::kOffsets && lane % 4 == 0) {
      StoreShared(OffsetAt(block, 4 * g),
                  KvType::HasBlockOffset() ? cell.BlockOffsets(block, 4 * g) : cell.TokenOffsets(4 * g));
    }
  }

 private:
  KVANTA_DEVICE int OperandAt(int block, int index, int lane) const {
    return base + ((block * kOperands + index) * kWarp + lane) * 16;
  }
  KVANTA_DEVICE int ScaleAt(int section, int token) const {
    return base + kScalesAt + section * kSectionBytes + token * 4;
  }
  KVANTA_DEVICE int OffsetAt(int section, int token) const {
    return base + kOffsetsAt + section * kOffsetSectionBytes + token * 2;
  }
};

// The same with operands of keys (or values) as core matrices: B operands of a warpgroup's products, whose n is a token
// (or channel) and whose k is 16 channels (or tokens). Columns n = 8 j + g are rows g and g + 8 of the two A operands:
// token (or channel of a block) 4 g + j.
template <class KvType, bool kIsKey, int kHeadDim>
struct CoreMatrixCell : DecodedCell<KvType, kIsKey, kHeadDim> {
  static constexpr int kColumns = kIsKey ? kChunkTokens : 32 * BlocksOf(kHeadDim);
  static constexpr int kHalfBytes = kColumns / 8 * kCoreBytes;  // of 8 k

  // By index: of keys 2 step of 16 channels + tile of tokens; of values 2 tile of channels + step of 16 tokens.
  KVANTA_DEVICE void SetOperand(int block, int index, int lane, const Vec4& operand) const {
    const int step = kIsKey ? 2 * block + index / 2 : index % 2;
    const int n = kIsKey ? index % 2 * 2 : 4 * block + index / 2 * 2;
    StoreColumns(Matrices(step, n), lane, operand);
  }
  // From column 8 n on.
  KVANTA_DEVICE CoreMatrices Matrices(int step, int n) const {
    return {this->base + 2 * step * kHalfBytes + n * kCoreBytes, kHalfBytes, kCoreBytes};
  }
};

}  // namespace kvanta::kernels::cuda
