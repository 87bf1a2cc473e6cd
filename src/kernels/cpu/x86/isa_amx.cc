// AVX-512 with AMX: the unit of isa_avx512.cc, but for what tiles are faster at.
#include "kernels/attention/cpu/x86/codes_avx512.h"
#include "kernels/cpu/x86/tiles_amx.h"
#include "kernels/cpu/x86/vec16_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/attention/cpu/x86/amx_keys.h"
#include "kernels/attention/cpu/x86/amx_values.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/cpu/x86/amx.h"

namespace kvanta::kernels {
namespace {

using formats::ElementType;

// Heads that are not whole tiles, and the few slots of a page that is being filled, are left to AVX-512. A query and
// its scores are of the same unit, for both depend on the head and its blocks alone.
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

// Codes of up to 6 bits cost as much to unpack as to multiply: a few rows are as fast by vectors, and of the same bits,
// for dots of integers are exact and what follows is in one order. (A block that vectors take in parts is in another.)
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

// Keys with a scale and a zero per channel: queries become coefficients tile by tile of tokens.
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
template <ElementType... kElementType>
void SetSubbyteTiles(AttentionKernels& kernels) {
  ((kernels.keys[static_cast<int>(kElementType)].score = ScoreSubbyteKeys<kElementType>,
    kernels.values[static_cast<int>(kElementType)] = {AccumulateValues<kElementType, SubbyteValues<kElementType>>}),
   ...);
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
  kernels.keys[static_cast<int>(ElementType::kLloyd4)] =
      TileKeyKernel<ElementType::kLloyd4, LloydKeys<ElementType::kLloyd4>>::kKernel;
  kernels.keys[static_cast<int>(ElementType::kLloyd3)] =
      TileKeyKernel<ElementType::kLloyd3, LloydKeys<ElementType::kLloyd3>>::kKernel;
  SetSubbyteTiles<ElementType::kInt6, ElementType::kInt5, ElementType::kInt4, ElementType::kInt3, ElementType::kInt2,
                  ElementType::kUint4, ElementType::kUint3, ElementType::kUint2, ElementType::kE2M1>(kernels);
  kernels.tiled_keys[static_cast<int>(ElementType::kUint4)].score = ScoreTiledKeys<ElementType::kUint4>;
  kernels.tiled_keys[static_cast<int>(ElementType::kUint2)].score = ScoreTiledKeys<ElementType::kUint2>;
  return kernels;
}

}  // namespace

const IsaTable& AmxTable() {
  static const AttentionKernels attention = MakeKernels();
  static const IsaTable table = [] {
    IsaTable result = Avx512Table();
    result.name = "amx";
    result.linear.bf16 = kBf16TileKernels;
    result.attention = &attention;
    return result;
  }();
  return table;
}

}  // namespace kvanta::kernels
