// AVX-512 with AMX: the unit of isa_avx512.cc, with tiles for the operations at which they are faster.
#include "kernels/attention/cpu/codes_avx512.h"
#include "kernels/cpu/tiles_amx.h"
#include "kernels/cpu/vec16_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/attention/cpu/amx_keys.h"
#include "kernels/attention/cpu/amx_values.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/cpu/amx.h"

namespace kvanta::kernels {
namespace {

using formats::ElementType;

// AVX-512 handles heads that are not whole tiles, and the few slots of a page that is being filled. Queries and scores
// choose the same unit: the choice depends on head_dim and block alone.
template <ElementType kElementType>
const KeyKernel& VectorKeys() {
  return Avx512Table().attention->keys[static_cast<int>(kElementType)];
}

template <class Keys>
bool MultipliesBlocks(int head_dim, int block) {
  return head_dim % kHeadStep == 0 && (block == 0 || block >= Keys::kBlock);
}

template <ElementType kElementType, class Keys>
struct TileKeyKernel {
  static int64_t QueryBytes(int head_dim) {
    const int64_t bytes = VectorKeys<kElementType>().query_bytes(head_dim);
    return head_dim % kHeadStep == 0 && TwoTermBytes(head_dim) > bytes ? TwoTermBytes(head_dim) : bytes;
  }
  static float Prepare(const float* query, int head_dim, int block, uint8_t* out) {
    if (!MultipliesBlocks<Keys>(head_dim, block))
      return VectorKeys<kElementType>().prepare(query, head_dim, block, out);
    return PrepareTwoTerms<Keys>(query, head_dim, block, out);
  }
  static void Score(const KeyPass& pass) {
    if (!MultipliesBlocks<Keys>(pass.cell.head_dim, pass.cell.block)) return VectorKeys<kElementType>().score(pass);
    ScoreTiles<Keys>(pass);
  }
  static constexpr KeyKernel kKernel{QueryBytes, Prepare, Score};
};

// Codes of up to 6 bits cost as much to unpack as to multiply: for a few rows vectors are as fast. Bits are the same,
// because integer dots are exact and the order of additions is the same (except for blocks that vectors split).
inline constexpr int kVectorRows = 4;
template <ElementType kElementType>
bool MultipliesByVectors(const CellView& cell, int rows) {
  if (cell.head_dim % kHeadStep != 0) return true;
  return rows <= kVectorRows && (!cell.block_scales || cell.block == SubbyteKey<SubbyteTypeOf<kElementType>>::kBlock);
}

template <ElementType kElementType>
void ScoreSubbyteKeys(const KeyPass& pass) {
  if (MultipliesByVectors<kElementType>(pass.cell, pass.rows)) return VectorKeys<kElementType>().score(pass);
  ScoreTiles<SubbyteKeys<kElementType>>(pass);
}

// Keys with a scale and an offset per channel: queries are quantized once per token group.
template <ElementType kElementType>
void ScoreTiledKeys(const KeyPass& pass) {
  if (MultipliesByVectors<kElementType>(pass.cell, pass.rows)) {
    return Avx512Table().attention->tiled_keys[static_cast<int>(kElementType)].score(pass);
  }
  using Keys =
      SubbyteKeys<kElementType, 1 << (formats::CodeBits(kElementType) - 1)>;  // less the middle, where zeros are taken
  Prefetcher prefetch{pass.prefetch, TileSteps<Keys>(pass)};
  const KeySource keys = FindKeys<Keys>(pass);
  KeepTmulAwake();
  ScoreTiledBy<kElementType, false>(pass, [&](const KeyPass& of_tile, const KeyScales& scales, int first, int last) {
    ScoreByTiles<Keys>(of_tile, keys, scales, first, last, prefetch);
  });
}

template <ElementType kElementType, class Values>
void AccumulateValues(const ValuePass& pass) {
  if (!SupportsAmx<Values>(pass) ||
      (IsSubbyte(kElementType) && MultipliesByVectors<kElementType>(pass.cell, pass.rows))) {
    return Avx512Table().attention->values[static_cast<int>(kElementType)].accumulate(pass);
  }
  if constexpr (IsSubbyte(kElementType)) {
    AccumulateSubbyteTiles<kElementType>(pass);
  } else {
    AccumulateTiles<Values>(pass);
  }
}

template <ElementType kElementType, class Keys, class Values>
void SetTiles(AttentionKernels& kernels) {
  kernels.keys[static_cast<int>(kElementType)] = TileKeyKernel<kElementType, Keys>::kKernel;
  kernels.values[static_cast<int>(kElementType)] = {AccumulateValues<kElementType, Values>};
}
// Kernels of the element types from kIndex on that unpack to bytes.
template <int kIndex = 0>
void SetUnpackedTiles(AttentionKernels& kernels) {
  if constexpr (kIndex < formats::kElementTypes) {
    constexpr auto kType = static_cast<ElementType>(kIndex);
    if constexpr (IsSubbyte(kType)) {
      kernels.keys[kIndex].score = ScoreSubbyteKeys<kType>;
      kernels.values[kIndex] = {AccumulateValues<kType, SubbyteValues<kType>>};
    }
    if constexpr (IsUnsigned(kType)) kernels.tiled_keys[kIndex].score = ScoreTiledKeys<kType>;
    if constexpr (formats::IsInteger(kType) && formats::Info(kType).decoding == formats::Decoding::kLookup8) {
      kernels.keys[kIndex] = TileKeyKernel<kType, LloydKeys<kType>>::kKernel;
    }
    SetUnpackedTiles<kIndex + 1>(kernels);
  }
}

AttentionKernels MakeKernels() {
  AttentionKernels kernels = *Avx512Table().attention;
  kernels.enter = [] { Tiles::Configure(); };
  kernels.leave = [] { Tiles::Release(); };
  kernels.pass_rows = kTileRows;
  SetTiles<ElementType::kBf16, Bf16Keys, Bf16Values>(kernels);
  SetTiles<ElementType::kE4M3, Fp8Keys<kE4M3Tables>, Fp8Values<kE4M3Tables>>(kernels);
  SetTiles<ElementType::kE5M2, Fp8Keys<kE5M2Tables>, Fp8Values<kE5M2Tables>>(kernels);
  SetTiles<ElementType::kInt8, Int8Keys, Int8Values>(kernels);
  SetUnpackedTiles(kernels);
  return kernels;
}

// Dots with a second operand in L1 each; kProducts: products per element of the sums.
template <class Dots, int kProducts>
float TileLoop(int64_t rounds, double* operations) noexcept {
  alignas(64) uint8_t operands[kTilesUnroll * kTileBytes] = {};
  Tiles::Configure();
  ForTiles<kTilesUnroll>([](auto tile) __attribute__((always_inline)) { Tiles::Zero<decltype(tile)::kValue>(); });
  Tiles::Zero<kFirstOperand>();
  for (int64_t round = 0; round < rounds; ++round) {
    ForTiles<kTilesUnroll>([&](auto tile) __attribute__((always_inline)) {
      constexpr int kTile = decltype(tile)::kValue, kOfColumns = kSecondOperand + kTile % 2;
      Tiles::Load<kOfColumns>(operands + kTile * kTileBytes, 64);
      Dots::template Dot<kTile, kFirstOperand, kOfColumns>();
    });
  }
  Tiles::Store<0>(operands, 64);
  Tiles::Release();
  *operations = 2.0 * kTileRows * 16 * kProducts * kTilesUnroll * static_cast<double>(rounds);
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
    result.limits.operand_terms = WideDots::kTerms;
    result.limits.subbyte_dot = TileLoop<SubbyteDots, 64>;
    return result;
  }();
  return table;
}

}  // namespace kvanta::kernels
