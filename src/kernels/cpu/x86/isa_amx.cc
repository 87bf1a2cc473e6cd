// The AMX unit: the AVX-512 unit with attention and linear layers by tiles where that is faster.
#include "kernels/attention/cpu/x86/codes_avx512.h"
#include "kernels/cpu/x86/tiles_amx.h"
#include "kernels/cpu/x86/vec16_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/attention/cpu/x86/amx_keys.h"
#include "kernels/attention/cpu/x86/amx_values.h"
#include "kernels/cpu/isa_table.h"

namespace kvanta::kernels {
namespace {

using formats::ElementType;

// AVX-512 handles heads that are not whole tiles, and the few slots of a page that is being filled. The prepared query
// and its scores always come from the same unit, since the choice depends on head_dim and block size alone.
template <ElementType kElementType>
const KeyKernel& Avx512Keys() {
  return Avx512Table().attention->keys[static_cast<int>(kElementType)];
}

template <class Keys>
bool SupportsAmxBlocks(int head_dim, int block) {
  return head_dim % kHeadStep == 0 && (block == 0 || block >= Keys::kBlock);
}

template <ElementType kElementType, class Keys>
struct TileKeyKernel {
  static int64_t QueryBytes(int head_dim) {
    const int64_t bytes = Avx512Keys<kElementType>().query_bytes(head_dim);
    return head_dim % kHeadStep == 0 && TwoTermBytes(head_dim) > bytes ? TwoTermBytes(head_dim) : bytes;
  }
  static float Prepare(const float* query, int head_dim, int block, uint8_t* out) {
    if (!SupportsAmxBlocks<Keys>(head_dim, block))
      return Avx512Keys<kElementType>().prepare(query, head_dim, block, out);
    return PrepareTwoTerms<Keys>(query, head_dim, block, out);
  }
  static void Score(const KeyPass& pass) {
    if (!SupportsAmxBlocks<Keys>(pass.cell.head_dim, pass.cell.block)) return Avx512Keys<kElementType>().score(pass);
    ScoreTiles<Keys>(pass);
  }
  static constexpr KeyKernel kKernel{QueryBytes, Prepare, Score};
};

// Decoding codes of up to 6 bits costs as much as multiplying them, so up to this many rows are as fast by vectors,
// with the same bits: integer dots are exact and the rest is in one order. (Blocks that vectors sum in parts have
// another order.)
inline constexpr int kMaxVectorRows = 4;
template <ElementType kElementType>
bool PrefersVectors(const CellView& cell, int rows) {
  if (cell.head_dim % kHeadStep != 0) return true;
  return rows <= kMaxVectorRows &&
         (!cell.block_scales || cell.block == SubbyteKey<SubbyteTypeOf<kElementType>>::kBlock);
}

template <ElementType kElementType>
void ScoreSubbyteKeys(const KeyPass& pass) {
  if (PrefersVectors<kElementType>(pass.cell, pass.rows)) return Avx512Keys<kElementType>().score(pass);
  ScoreTiles<SubbyteKeys<kElementType>>(pass);
}

// Keys with a scale and an offset per channel: the query is quantized once per token group.
template <ElementType kElementType>
void ScoreChannelScaledKeys(const KeyPass& pass) {
  if (PrefersVectors<kElementType>(pass.cell, pass.rows)) {
    return Avx512Table().attention->channel_scaled_keys[static_cast<int>(kElementType)].score(pass);
  }
  using Keys = SubbyteKeys<kElementType,
                           1 << (formats::CodeBits(kElementType) - 1)>;  // less the middle code, to which offsets refer
  Prefetcher prefetch{pass.prefetch, TileSteps<Keys>(pass)};
  const KeySource keys = FindKeys<Keys>(pass);
  KeepTmulAwake();
  ScoreByTokenGroup<kElementType, false>(pass,
                                         [&](const KeyPass& scaled, const KeyScales& scales, int first, int last) {
                                           ScoreByTiles<Keys>(scaled, keys, scales, first, last, prefetch);
                                         });
}

template <ElementType kElementType, class Values>
void AccumulateValues(const ValuePass& pass) {
  if (!SupportsAmx<Values>(pass) || (IsSubbyte(kElementType) && PrefersVectors<kElementType>(pass.cell, pass.rows))) {
    const ValueKernel& vectors = Avx512Table().attention->values[static_cast<int>(kElementType)];
    if (vectors.load != nullptr) vectors.load(pass);
    return vectors.accumulate(pass);
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
    if constexpr (IsUnsigned(kType)) kernels.channel_scaled_keys[kIndex].score = ScoreChannelScaledKeys<kType>;
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
  SetTiles<ElementType::kBf16, Bf16Keys, Bf16Values>(kernels);
  kernels.exact_keys = kernels.keys[static_cast<int>(ElementType::kBf16)];
  kernels.exact_values = kernels.values[static_cast<int>(ElementType::kBf16)];
  SetTiles<ElementType::kE4M3, Fp8Keys<kE4M3Tables>, Fp8Values<kE4M3Tables>>(kernels);
  SetTiles<ElementType::kE5M2, Fp8Keys<kE5M2Tables>, Fp8Values<kE5M2Tables>>(kernels);
  SetTiles<ElementType::kInt8, Int8Keys, Int8Values>(kernels);
  SetUnpackedTiles(kernels);
  return kernels;
}

}  // namespace

const IsaTable& AmxTable() {
  static const AttentionKernels attention = MakeKernels();
  static const IsaTable table = [] {
    IsaTable result = Avx512Table();
    result.name = "amx";
    result.linear = AmxLinearKernels();
    result.attention = &attention;
    return result;
  }();
  return table;
}

}  // namespace kvanta::kernels
