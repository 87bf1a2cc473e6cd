// AVX-512 with AMX: the unit of isa_avx512.cc, but for what tiles are faster at.
#include "kernels/cpu/codes_avx512.h"
#include "kernels/cpu/lanes_avx512.h"
#include "kernels/cpu/tiles_amx.h"
// Primitives first, then the kernels written over them.
#include "kernels/cpu/attention_tiles.h"
#include "kernels/cpu/attention_tiles_values.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/cpu/linear_tiles.h"

namespace kvanta::kernels {
namespace {

using formats::Code;

// Heads that are not whole tiles, and the few slots of a page that is being filled, are left to AVX-512. A query and
// its scores are of the same unit, for both depend on the head and its blocks alone.
template <Code kCode>
const KeyKernel& VectorKeys() {
  return Avx512Table().attention->keys[static_cast<int>(kCode)];
}

template <class Keys>
bool MeetsBlocks(int head_dim, int block) {
  return head_dim % kHeadStep == 0 && (block == 0 || block >= Keys::kBlock);
}

template <Code kCode, class Keys>
struct TileKeyKernel {
  static int64_t QueryBytes(int head_dim) {
    const int64_t bytes = VectorKeys<kCode>().query_bytes(head_dim);
    return head_dim % kHeadStep == 0 && TwoTermBytes(head_dim) > bytes ? TwoTermBytes(head_dim) : bytes;
  }
  static float Prepare(const float* query, int head_dim, int block, uint8_t* out) {
    if (!MeetsBlocks<Keys>(head_dim, block)) return VectorKeys<kCode>().prepare(query, head_dim, block, out);
    return PrepareTwoTerms<Keys>(query, head_dim, block, out);
  }
  static void Score(const KeyPass& pass) {
    if (!MeetsBlocks<Keys>(pass.cell.head_dim, pass.cell.block)) return VectorKeys<kCode>().score(pass);
    ScoreTiles<Keys>(pass);
  }
  static constexpr KeyKernel kKernel{QueryBytes, Prepare, Score};
};

// Codes of up to 6 bits cost as much to unpack as to multiply: a few rows are as fast by vectors, and of the same bits,
// for dots of integers are exact and what follows is in one order. (A block that vectors take in parts is in another.)
inline constexpr int kVectorRows = 4;
template <Code kCode>
bool MeetsByVectors(const CellView& cell, int rows) {
  if (cell.head_dim % kHeadStep != 0) return true;
  return rows <= kVectorRows && (!cell.block_scales || cell.block == NarrowKey<NarrowCodeOf<kCode>>::kBlock);
}

template <Code kCode>
void ScoreNarrowKeys(const KeyPass& pass) {
  if (MeetsByVectors<kCode>(pass.cell, pass.rows)) return VectorKeys<kCode>().score(pass);
  ScoreTiles<NarrowKeys<kCode>>(pass);
}

// Keys with a scale and a zero per channel: queries become coefficients tile by tile of tokens.
template <Code kCode>
void ScoreTiledKeys(const KeyPass& pass) {
  if (MeetsByVectors<kCode>(pass.cell, pass.rows)) {
    return Avx512Table().attention->tiled_keys[static_cast<int>(kCode)].score(pass);
  }
  using Keys = NarrowKeys<kCode, 1 << (formats::CodeBits(kCode) - 1)>;  // less the middle, where zeros are taken
  Prefetcher prefetch{pass.prefetch, TileSteps<Keys>(pass)};
  const KeySource keys = FindKeys<Keys>(pass);
  StayAwake();
  ScoreTiledBy<kCode, false>(pass, [&](const KeyPass& of_tile, const KeyScales& scales, int first, int last) {
    ScoreByTiles<Keys>(of_tile, keys, scales, first, last, prefetch);
  });
}

template <Code kCode, class Values>
void AccumulateValues(const ValuePass& pass) {
  if (!MeetsByTiles<Values>(pass) || (IsNarrow(kCode) && MeetsByVectors<kCode>(pass.cell, pass.rows))) {
    return Avx512Table().attention->values[static_cast<int>(kCode)].accumulate(pass);
  }
  if constexpr (IsNarrow(kCode)) {
    AccumulateNarrowTiles<kCode>(pass);
  } else {
    AccumulateTiles<Values>(pass);
  }
}

template <Code kCode, class Keys, class Values>
void SetTiles(AttentionKernels& kernels) {
  kernels.keys[static_cast<int>(kCode)] = TileKeyKernel<kCode, Keys>::kKernel;
  kernels.values[static_cast<int>(kCode)] = {AccumulateValues<kCode, Values>};
}
template <Code... kCode>
void SetNarrowTiles(AttentionKernels& kernels) {
  ((kernels.keys[static_cast<int>(kCode)].score = ScoreNarrowKeys<kCode>,
    kernels.values[static_cast<int>(kCode)] = {AccumulateValues<kCode, NarrowValues<kCode>>}),
   ...);
}

AttentionKernels MakeKernels() {
  AttentionKernels kernels = *Avx512Table().attention;
  kernels.enter = [] { Tiles::Configure(); };
  kernels.leave = [] { Tiles::Release(); };
  kernels.pass_rows = kTileRows;
  SetTiles<Code::kBf16, Bf16Keys, Bf16Values>(kernels);
  SetTiles<Code::kE4M3, Fp8Keys<kE4M3Tables>, Fp8Values<kE4M3Tables>>(kernels);
  SetTiles<Code::kE5M2, Fp8Keys<kE5M2Tables>, Fp8Values<kE5M2Tables>>(kernels);
  SetTiles<Code::kInt8, Int8Keys, Int8Values>(kernels);
  kernels.keys[static_cast<int>(Code::kLloyd4)] = TileKeyKernel<Code::kLloyd4, LloydKeys<Code::kLloyd4>>::kKernel;
  kernels.keys[static_cast<int>(Code::kLloyd3)] = TileKeyKernel<Code::kLloyd3, LloydKeys<Code::kLloyd3>>::kKernel;
  SetNarrowTiles<Code::kInt6, Code::kInt5, Code::kInt4, Code::kInt3, Code::kInt2, Code::kUint4, Code::kUint3,
                 Code::kUint2, Code::kE2M1>(kernels);
  kernels.tiled_keys[static_cast<int>(Code::kUint4)].score = ScoreTiledKeys<Code::kUint4>;
  kernels.tiled_keys[static_cast<int>(Code::kUint2)].score = ScoreTiledKeys<Code::kUint2>;
  return kernels;
}

// Dots with a second operand of their own each, which lies in L1; kProducts: of an element of the sums.
template <class Dots, int kProducts>
float TileLoop(int64_t rounds, double* operations) noexcept {
  alignas(64) uint8_t operands[kTilesBeside * kTileBytes] = {};
  Tiles::Configure();
  ForTiles<kTilesBeside>([](auto tile) __attribute__((always_inline)) { Tiles::Zero<decltype(tile)::kValue>(); });
  Tiles::Zero<kFirstOperand>();
  for (int64_t round = 0; round < rounds; ++round) {
    ForTiles<kTilesBeside>([&](auto tile) __attribute__((always_inline)) {
      constexpr int kTile = decltype(tile)::kValue, kOfColumns = kSecondOperand + kTile % 2;
      Tiles::Load<kOfColumns>(operands + kTile * kTileBytes, 64);
      Dots::template Dot<kTile, kFirstOperand, kOfColumns>();
    });
  }
  Tiles::Store<0>(operands, 64);
  Tiles::Release();
  *operations = 2.0 * kTileRows * 16 * kProducts * kTilesBeside * static_cast<double>(rounds);
  return static_cast<float>(operands[0]);
}

}  // namespace

const IsaTable& AmxTable() {
  static const AttentionKernels attention = MakeKernels();
  static const IsaTable table = [] {
    IsaTable result = Avx512Table();
    result.name = "amx";
    result.linear.bf16 = kBf16TileKernels;
    result.attention = &attention;
    result.limits.bf16_dot = TileLoop<FloatDots, 32>;
    result.limits.bf16_terms_dot = TileLoop<FloatDots, 32 / FloatDots::kTerms>;
    result.limits.wide_dot = TileLoop<WideDots, 64>;
    result.limits.coefficient_terms = WideDots::kTerms;
    result.limits.narrow_dot = TileLoop<NarrowDots, 64>;
    return result;
  }();
  return table;
}

}  // namespace kvanta::kernels
