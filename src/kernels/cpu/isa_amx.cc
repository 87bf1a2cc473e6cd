// AVX-512 with AMX: the unit of isa_avx512.cc, but for what tiles are faster at.
#include "kernels/cpu/codes_avx512.h"
#include "kernels/cpu/lanes_avx512.h"
#include "kernels/cpu/tiles_amx.h"
// Primitives first, then the kernels written over them.
#include "kernels/cpu/attention_tiles.h"
#include "kernels/cpu/attention_tiles_values.h"
#include "kernels/cpu/isa_table.h"

namespace kvanta::kernels {
namespace {

using formats::Code;

// Heads that are not whole tiles, and the few slots of a page that is being filled, are left to AVX-512. A query and its
// scores are of the same unit, for both depend on the head alone.
template <Code kCode>
const KeyKernel& VectorKeys() {
  return Avx512Table().attention->keys[static_cast<int>(kCode)];
}

template <Code kCode, class Keys>
struct TileKeyKernel {
  static int64_t QueryBytes(int head_dim) {
    const int64_t bytes = VectorKeys<kCode>().query_bytes(head_dim);
    return head_dim % kHeadStep == 0 && TwoTermBytes(head_dim) > bytes ? TwoTermBytes(head_dim) : bytes;
  }
  static float Prepare(const float* query, int head_dim, int block, uint8_t* out) {
    if (head_dim % kHeadStep != 0) return VectorKeys<kCode>().prepare(query, head_dim, block, out);
    return PrepareTwoTerms<Keys>(query, head_dim, block, out);
  }
  static void Score(const KeyPass& pass) {
    if (pass.cell.head_dim % kHeadStep != 0) return VectorKeys<kCode>().score(pass);
    ScoreTiles<Keys>(pass);
  }
  static constexpr KeyKernel kKernel{QueryBytes, Prepare, Score};
};

template <Code kCode>
void ScoreNarrowKeys(const KeyPass& pass) {
  if (pass.cell.head_dim % kHeadStep != 0) return VectorKeys<kCode>().score(pass);
  ScoreTiles<NarrowKeys<kCode>>(pass);
}

// Keys with a scale and a zero per channel: queries become coefficients tile by tile of tokens.
template <Code kCode>
void ScoreTiledKeys(const KeyPass& pass) {
  if (pass.cell.head_dim % kHeadStep != 0) {
    return Avx512Table().attention->tiled_keys[static_cast<int>(kCode)].score(pass);
  }
  Prefetcher prefetch{pass.prefetch, TileSteps<NarrowKeys<kCode>>(pass)};
  ScoreTiledBy<kCode>(pass, [&](const KeyPass& of_tile, const KeyScales& scales, int first, int last) {
    ScoreByTiles<NarrowKeys<kCode>>(of_tile, scales, first, last, prefetch);
  });
}

template <Code kCode, class Values>
void AccumulateValues(const ValuePass& pass) {
  if (!MeetsByTiles<Values>(pass)) return Avx512Table().attention->values[static_cast<int>(kCode)].accumulate(pass);
  if constexpr (Values::kNarrow) {
    AccumulateNarrowTiles<kCode>(pass);
  } else {
    AccumulateTiles<Values>(pass);
  }
}

template <Code kCode, class Keys, class Values>
void Set(AttentionKernels& kernels) {
  kernels.keys[static_cast<int>(kCode)] = TileKeyKernel<kCode, Keys>::kKernel;
  kernels.values[static_cast<int>(kCode)] = {AccumulateValues<kCode, Values>};
}
template <Code... kCode>
void SetNarrow(AttentionKernels& kernels) {
  ((kernels.keys[static_cast<int>(kCode)].score = ScoreNarrowKeys<kCode>,
    kernels.values[static_cast<int>(kCode)] = {AccumulateValues<kCode, NarrowValues<kCode>>}),
   ...);
}

AttentionKernels MakeKernels() {
  AttentionKernels kernels = *Avx512Table().attention;
  kernels.enter = [] { Tiles::Configure(); };
  kernels.leave = [] { Tiles::Release(); };
  Set<Code::kBf16, Bf16Keys, Bf16Values>(kernels);
  Set<Code::kE4M3, Fp8Keys<kE4M3Tables>, Fp8Values<kE4M3Tables>>(kernels);
  Set<Code::kE5M2, Fp8Keys<kE5M2Tables>, Fp8Values<kE5M2Tables>>(kernels);
  Set<Code::kInt8, Int8Keys, Int8Values>(kernels);
  Set<Code::kLloyd4, LloydKeys<Code::kLloyd4>, LloydValues<Code::kLloyd4>>(kernels);
  Set<Code::kLloyd3, LloydKeys<Code::kLloyd3>, LloydValues<Code::kLloyd3>>(kernels);
  SetNarrow<Code::kInt6, Code::kInt5, Code::kInt4, Code::kInt3, Code::kInt2, Code::kUint4, Code::kUint3, Code::kUint2,
            Code::kE2M1>(kernels);
  kernels.tiled_keys[static_cast<int>(Code::kUint4)].score = ScoreTiledKeys<Code::kUint4>;
  kernels.tiled_keys[static_cast<int>(Code::kUint2)].score = ScoreTiledKeys<Code::kUint2>;
  return kernels;
}

}  // namespace

const IsaTable& AmxTable() {
  static const AttentionKernels attention = MakeKernels();
  static const IsaTable table = [] {
    IsaTable result = Avx512Table();
    result.name = "amx";
    result.attention = &attention;
    return result;
  }();
  return table;
}

}  // namespace kvanta::kernels
