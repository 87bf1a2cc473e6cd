// Attention of a warpgroup's query tiles to a decoded chunk: S = Q K^T and O = P V with query rows on M, a tile of 16
// for each warp, and decoded cells as B operands in shared memory. A row's operations are those of scores.h,
// row_state.h and weighted_values.h, whose rows lie on N. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/chunk_attention.h"
#include "kernels/attention/cuda/decoded_cells.h"
#include "kernels/attention/cuda/rows_on_m.h"

namespace kvanta::kernels::cuda {

// A warp's tile of 16 rows: softmax state and outputs.
template <class Kernel>
struct WarpgroupTile {
  using Keys = typename Kernel::KeyTypes::Stored;
  using Values = typename Kernel::ValueTypes::Stored;
  using Outputs = typename Kernel::Outputs;
  static constexpr int kHeadDim = Kernel::HeadDim(0);
  static constexpr int kBlocks = BlocksOf(kHeadDim);
  static constexpr int kRowTiles = Outputs::kRowTiles;
  static_assert(kRowTiles == 2);
  // With results or operands for each block of a wide head, the compiler lacks registers and waits for each product.
  static constexpr bool kFits =
      kBlocks <= 4 || !(HasBlockScales(Keys::BlockScaling()) || HasBlockScales(Values::BlockScaling()));
  using DecodedKeys = CoreMatrixCell<Keys, true, kHeadDim>;
  using DecodedValues = CoreMatrixCell<Values, false, kHeadDim>;

  // Factors for the lane's rows.
  struct Scales {
    float row[kRowTiles], offset[kRowTiles];  // RowScales
    float bias[kRowTiles];                    // ToLogit
    float values;
  };

  KVANTA_DEVICE explicit WarpgroupTile(const AttentionParams& params) {
    RowState<kRowTiles> state;
    InitRowState<kRowTiles>(params.v_type.decode, state);
    SetState(state);
    KVANTA_UNROLL
    for (int i = 0; i < 16 * kBlocks; ++i) out_[i / 4][i % 4] = 0;
  }

  template <class TileScales>
  static KVANTA_DEVICE Scales ScalesOf(const AttentionParams& params, const TileMemory& memory, TileScales scales,
                                       int lane) {
    TransposeValues<kRowTiles>(scales.keys.row);
    TransposeValues<kRowTiles>(scales.keys.offset);
    Scales of_rows;
    of_rows.values = scales.values;
    KVANTA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) {
      of_rows.row[i] = scales.keys.row[i][0];
      of_rows.offset[i] = scales.keys.offset[i][0];
      of_rows.bias[i] = LoadShared<float>(memory.bias + 4 * (kRowsPerMma * i + lane / 4)) * params.softmax_scale;
    }
    return of_rows;
  }

  // Attends to a chunk that every row sees, by all warps of the warpgroup. `queries`: the operands of the warp's tile.
  KVANTA_DEVICE void Attend(const AttentionParams& params, const Keys& keys, const Values& values,
                            const QueriesOnM& queries, const DecodedKeys& key_cell, const DecodedValues& value_cell,
                            const Scales& scales, int lane) {
    float s[4][4];  // [j][2 i + e]: logits, then probabilities
    KeyProducts(keys, key_cell, queries, lane, s);
    ScaleLogits(params, keys, key_cell, scales, lane % 4, s);
    float rescale[kRowTiles];
    Softmax(s, rescale);
    AddValues(values, value_cell, scales.values, lane % 4, s, rescale);
  }

  // Calls f(state, outputs) with what is here in rows on N.
  template <class F>
  KVANTA_DEVICE void OnN(F f) {
    RowState<kRowTiles> state;
    Outputs outputs;
    GetState(state);
    TransposeState(state);
    ForBlocks([&](int block, RowFragments<kRowTiles>& out) {
      GetBlock(block, out);
      TransposeFragments<kRowTiles>(out);
      outputs.Store(block, out);
    });
    f(state, outputs);
    TransposeState(state);
    SetState(state);
    ForBlocks([&](int block, RowFragments<kRowTiles>& out) {
      outputs.Load(block, out);
      TransposeFragments<kRowTiles>(out);
      SetBlock(block, out);
    });
  }
  // The result, whose sums are of whole rows, with e in place of q.
  KVANTA_DEVICE void Result(RowState<kRowTiles>& state, Outputs& outputs) const {
    GetState(state);
    KVANTA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) {
      state.sum[i][0] = state.sum[i][1] = ReduceLaneRow(sum_[i], [](float a, float b) { return a + b; });
    }
    ForBlocks([&](int block, RowFragments<kRowTiles>& out) {
      GetBlock(block, out);
      outputs.Store(block, out);
    });
  }

 private:
  float max_[kRowTiles];
  float sum_[kRowTiles][2];  // of this lane's probabilities, of e = 0 and 1
  int exponent_[kRowTiles];
  float out_[4 * kBlocks][4];  // [4 block + j][2 i + e]

  KVANTA_DEVICE void GetState(RowState<kRowTiles>& state) const {
    ForRows<kRowTiles>([&](int i, int e) {
      state.max[i][e] = max_[i];
      state.sum[i][e] = sum_[i][e];
      state.exponent[i][e] = exponent_[i];
    });
  }
  KVANTA_DEVICE void SetState(const RowState<kRowTiles>& state) {
    ForRows<kRowTiles>([&](int i, int e) {
      max_[i] = state.max[i][0];
      sum_[i][e] = state.sum[i][e];
      exponent_[i] = state.exponent[i][0];
    });
  }
  static KVANTA_DEVICE void TransposeState(RowState<kRowTiles>& state) {
    TransposeValues<kRowTiles>(state.max);
    TransposeValues<kRowTiles>(state.sum);
    KVANTA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) TransposeRows(state.exponent[i][0], state.exponent[i][1]);
  }
  KVANTA_DEVICE void GetBlock(int block, RowFragments<kRowTiles>& to) const {
    KVANTA_UNROLL
    for (int i = 0; i < 8 * kRowTiles; ++i) {
      to[i / 8][i / 4 % 2][i % 4] = out_[4 * block + i / 2 % 4][i / 8 * 2 + i % 2];
    }
  }
  KVANTA_DEVICE void SetBlock(int block, const RowFragments<kRowTiles>& from) {
    KVANTA_UNROLL
    for (int i = 0; i < 8 * kRowTiles; ++i) {
      out_[4 * block + i / 2 % 4][i / 8 * 2 + i % 2] = from[i / 8][i / 4 % 2][i % 4];
    }
  }
  template <class F>
  static KVANTA_DEVICE void ForBlocks(F f) {
    KVANTA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      RowFragments<kRowTiles> out;
      f(block, out);
    }
  }

  static constexpr int kPartBlocks = kBlocks < 4 ? kBlocks : 4;  // whose operands are in registers at once
  static_assert(kBlocks % kPartBlocks == 0);

  // Dots of the chunk's tokens, with block scales applied.
  static KVANTA_DEVICE void KeyProducts(const Keys& type, const DecodedKeys& cell, const QueriesOnM& queries, int lane,
                                        float (&s)[4][4]) {
    constexpr bool kScaled = HasBlockScales(Keys::BlockScaling());
    constexpr int kTerms = Keys::kTerms;
    KVANTA_UNROLL
    for (int i = 0; i < 16; ++i) s[i / 4][i % 4] = 0;
    KVANTA_UNROLL
    for (int first = 0; first < kBlocks; first += kPartBlocks) {
      Vec4 a[2 * kPartBlocks * kTerms];
      KVANTA_UNROLL
      for (int i = 0; i < 2 * kPartBlocks * kTerms; ++i) {
        a[i] = queries.Load(i % kTerms, 2 * first + i / kTerms, kHeadDim, lane);
      }
      float dots[kScaled ? 4 * kPartBlocks : 4][4];
      KVANTA_UNROLL
      for (int i = 0; i < (kScaled ? 16 * kPartBlocks : 16); ++i) {
        dots[i / 4][i % 4] = kScaled ? 0.0F : s[i / 4 % 4][i % 4];
      }
      HoldRegisters(a);
      if (first != 0) HoldRegisters(dots);  // zeros are not written, but part of the first product
      FenceProducts();
      KVANTA_UNROLL
      for (int i = 0; i < 2 * kPartBlocks * kTerms; ++i) {
        const int step = i / kTerms;
        WarpgroupMma<Keys::kBf16, 4>(dots + (kScaled ? step / 2 * 4 : 0), a[i], cell.Matrices(2 * first + step, 0));
      }
      CommitProducts();
      WaitForProducts();
      HoldRegisters(dots);
      HoldRegisters(a);
      if constexpr (kScaled) {
        KVANTA_UNROLL
        for (int block = 0; block < kPartBlocks; ++block) {
          float scales[2][4];
          LaneScales(lane % 4, [&](int g, int e) { BlockScales(type, cell, kHeadDim, first + block, g, scales[e]); });
          KVANTA_UNROLL
          for (int i = 0; i < 16; ++i) {
            float& sum = s[i / 4][i % 4];
            sum = MultiplyAdd(dots[4 * block + i / 4][i % 4], scales[i % 2][i / 4], sum);
          }
        }
      } else {
        KVANTA_UNROLL
        for (int i = 0; i < 16; ++i) s[i / 4][i % 4] = dots[i / 4][i % 4];
      }
    }
  }
  // Calls load(g, e) for the groups 4 g to 4 g + 3 of the lane's tokens.
  template <class F>
  static KVANTA_DEVICE void LaneScales(int t, F load) {
    KVANTA_UNROLL
    for (int e = 0; e < 2; ++e) load(2 * t + e, e);
  }

  static KVANTA_DEVICE void ScaleLogits(const AttentionParams& params, const Keys& type, const DecodedKeys& cell,
                                        const Scales& rows, int t, float (&s)[4][4]) {
    constexpr bool kHasScales = Keys::TokenScaling() != formats::ScaleType::kNone;
    float scales[2][4];
    float offsets[2][4];
    LaneScales(t, [&](int g, int e) {
      if (kHasScales) TokenScales(type, cell, g, scales[e]);
      if (Keys::HasTokenOffset()) F16ToFloats(cell.TokenOffsets(4 * g), offsets[e]);
    });
    const bool converts = NeedsLogits(params);
    KVANTA_UNROLL
    for (int i = 0; i < 16; ++i) {
      const int j = i / 4;
      const int row = i / 2 % 2;
      const int e = i % 2;
      float& x = s[j][i % 4];
      x *= rows.row[row];
      if (kHasScales) x *= scales[e][j];
      if (Keys::HasTokenOffset()) x = MultiplyAdd(offsets[e][j], rows.offset[row], x);
      if (converts) x = ToLogit(params, rows.bias[row], x);
    }
  }

  // Online softmax, as of row_state.h.
  KVANTA_DEVICE void Softmax(float (&s)[4][4], float (&rescale)[kRowTiles]) {
    KVANTA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) {
      const auto max_of = [](float a, float b) { return fmaxf(a, b); };
      float peaks[2];
      KVANTA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int at = 2 * i + e;
        peaks[e] = fmaxf(fmaxf(s[0][at], s[1][at]), fmaxf(s[2][at], s[3][at]));
      }
      const float max = fmaxf(max_[i], ReduceLaneRow(peaks, max_of));
      const float base = max == kMinusInfinity ? 0.0F : max;
      rescale[i] = Exp2(max_[i] - base);
      max_[i] = max;
      KVANTA_UNROLL
      for (int e = 0; e < 2; ++e) {
        float sum = 0;
        KVANTA_UNROLL
        for (int j = 0; j < 4; ++j) {
          float& x = s[j][2 * i + e];
          x = Exp2(x - base);
          sum += x;
        }
        sum_[i][e] = MultiplyAdd(sum_[i][e], rescale[i], sum);
      }
    }
  }

  // A operands of 16 tokens and a term each.
  using Operands = Vec4[2 * Values::kTerms];

  // p: probabilities, as for WeightedValues::Add.
  KVANTA_DEVICE void AddValues(const Values& type, const DecodedValues& cell, float value_scale, int t,
                               const float (&p)[4][4], const float (&rescale)[kRowTiles]) {
    constexpr bool kScaled = HasBlockScales(Values::BlockScaling());
    float factor[kRowTiles], unit[kRowTiles];
    float offsets[kRowTiles] = {};
    const int exponent = Values::kBf16 ? 0 : ExponentOfScales(cell.LargestScale(value_scale));
    bool rescales = false;
    KVANTA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) {
      factor[i] = rescale[i];
      if (!Values::kBf16) RaiseExponent(exponent, exponent_[i], factor[i]);
      rescales = rescales || factor[i] != 1;
      unit[i] = PowerOfTwo(kTopExponent - exponent_[i]);
    }
    rescales = AnyLane(rescales);
    float in_units[4][4];
    KVANTA_UNROLL
    for (int i = 0; i < 16; ++i) in_units[i / 4][i % 4] = p[i / 4][i % 4] * (unit[i / 2 % 2] * value_scale);
    if (Values::HasTokenOffset()) OffsetSums(t, p, unit, offsets, [&](int token) { return cell.TokenOffsets(token); });
    Vec4 a[kScaled ? kBlocks : 1][2 * Values::kTerms];
    if constexpr (!kScaled) {
      float scales[2][4];
      LaneScales(t, [&](int g, int e) { TokenScales(type, cell, g, scales[e]); });
      ScaleProbs(in_units, scales, a[0]);
    }
    KVANTA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      if constexpr (kScaled) {
        float scales[2][4];
        LaneScales(t, [&](int g, int e) { BlockScales(type, cell, kHeadDim, block, g, scales[e]); });
        ScaleProbs(in_units, scales, a[block]);
      }
      if (Values::HasBlockOffset()) {
        OffsetSums(t, p, unit, offsets, [&](int token) { return cell.BlockOffsets(block, token); });
      }
      if (rescales) ForBlock(block, [&](int i, float& x) { x *= factor[i]; });
      if (Values::HasTokenOffset() || Values::HasBlockOffset()) {
        ForBlock(block, [&](int i, float& x) { x += offsets[i]; });
      }
    }
    Multiply<kScaled>(cell, a);
  }
  template <class F>
  KVANTA_DEVICE void ForBlock(int block, F f) {
    KVANTA_UNROLL
    for (int i = 0; i < 16; ++i) f(i / 2 % 2, out_[4 * block + i / 4][i % 4]);
  }

  // Probabilities times scales as operands. `scales`: of tokens 4 (2 t + e) + j.
  static KVANTA_DEVICE void ScaleProbs(const float (&p)[4][4], const float (&scales)[2][4], Operands& operands) {
    KVANTA_UNROLL
    for (int index = 0; index < 8; ++index) {
      const int j = index / 2;
      const int i = index % 2;
      float x[2] = {p[j][2 * i] * scales[0][j], p[j][2 * i + 1] * scales[1][j]};
      KVANTA_UNROLL
      for (int term = 0; term < Values::kTerms; ++term) {
        operands[j / 2 * Values::kTerms + term].word[j % 2 * 2 + i] = NextTerm<Values>(x);
      }
    }
  }

  // WeightedValues::OffsetSums. offsets_of(token): of 4 tokens.
  template <class F>
  static KVANTA_DEVICE void OffsetSums(int t, const float (&p)[4][4], const float (&unit)[kRowTiles],
                                       float (&sums)[kRowTiles], F offsets_of) {
    float offsets[2][4];
    LaneScales(t, [&](int g, int e) { F16ToFloats(offsets_of(4 * g), offsets[e]); });
    KVANTA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) {
      float of_lane[2] = {};
      KVANTA_UNROLL
      for (int index = 0; index < 8; ++index) {
        const int e = index / 4;
        of_lane[e] = MultiplyAdd(p[index % 4][2 * i + e], offsets[e][index % 4], of_lane[e]);
      }
      sums[i] = ReduceLaneRow(of_lane, [](float a, float b) { return a + b; }) * unit[i];
    }
  }

  // Adds P V.
  template <bool kScaled, int kOperands>
  KVANTA_DEVICE void Multiply(const DecodedValues& cell, Vec4 (&a)[kOperands][2 * Values::kTerms]) {
    KVANTA_UNROLL
    for (int block = 0; block < kOperands; ++block) HoldRegisters(a[block]);
    HoldRegisters(out_);
    FenceProducts();
    constexpr int kStep = kScaled ? 1 : kPartBlocks;  // blocks of a product
    KVANTA_UNROLL
    for (int block = 0; block < kBlocks; block += kStep) {
      KVANTA_UNROLL
      for (int i = 0; i < 2 * Values::kTerms; ++i) {
        WarpgroupMma<Values::kBf16, 4 * kStep>(out_ + 4 * block, a[kScaled ? block : 0][i],
                                               cell.Matrices(i / Values::kTerms, 4 * block));
      }
    }
    CommitProducts();
    WaitForProducts();
    HoldRegisters(out_);
    KVANTA_UNROLL
    for (int block = 0; block < kOperands; ++block) HoldRegisters(a[block]);
  }
};

}  // namespace kvanta::kernels::cuda
