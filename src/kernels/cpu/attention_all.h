// The table of an ISA unit's attention kernels; included by isa_<isa>.cc after the unit's codes.
#pragma once

#include "kernels/cpu/attention_halves.h"
#include "kernels/cpu/attention_kernels.h"
#include "kernels/cpu/attention_narrow.h"
#include "kernels/cpu/attention_narrow_values.h"
#include "kernels/cpu/attention_softmax.h"
#include "kernels/cpu/attention_table.h"
#include "kernels/cpu/attention_transform.h"
#include "kernels/cpu/attention_turn.h"
#include "kernels/cpu/attention_unpack.h"

namespace kvanta::kernels {
namespace {

template <class Code>
constexpr KeyKernel MakeKeyKernel() {
  return {QueryBytes<Code>, PrepareQuery<Code>, Score<Code>};
}

// The kernels of the codes that are unpacked first.
template <formats::Code... kCode>
constexpr void SetUnpacked(AttentionKernels& kernels) {
  ((kernels.keys[static_cast<int>(kCode)] = {QueryBytes<CodeInt8>, PrepareUnpacked<kCode>, ScoreUnpacked<kCode>},
    kernels.values[static_cast<int>(kCode)] = {AccumulateUnpacked<kCode>}),
   ...);
}

template <formats::Code... kCode>
constexpr void SetNarrow(AttentionKernels& kernels) {
  ((kernels.keys[static_cast<int>(kCode)] = {QueryBytes<NarrowQuery>, PrepareNarrow<kCode>,
                                             ScoreNarrow<NarrowKey<NarrowCodeOf<kCode>>>},
    kernels.values[static_cast<int>(kCode)] = {AccumulateNarrow<kCode>}),
   ...);
}

template <formats::Code... kCode>
constexpr void SetTiled(AttentionKernels& kernels) {
  ((kernels.tiled_keys[static_cast<int>(kCode)] = {TiledQueryBytes, PrepareTiled, ScoreTiled<kCode>}), ...);
}

template <class Code>
constexpr void Set(AttentionKernels& kernels, formats::Code code) {
  if constexpr (requires { typename Code::Halves; }) {
    kernels.keys[static_cast<int>(code)] = {QueryBytes<Code>, PrepareHalves<Code>, ScoreHalves<Code>};
    kernels.values[static_cast<int>(code)] = {AccumulateHalves<Code>};
  } else {
    kernels.keys[static_cast<int>(code)] = MakeKeyKernel<Code>();
    kernels.values[static_cast<int>(code)] = {Accumulate<Code>};
  }
}

constexpr AttentionKernels MakeAttentionKernels() {
  using formats::Code;
  AttentionKernels kernels{};
  Set<CodeFp32>(kernels, Code::kFp32);
  Set<CodeBf16>(kernels, Code::kBf16);
  Set<CodeFp16>(kernels, Code::kFp16);
  Set<CodeE4M3>(kernels, Code::kE4M3);
  Set<CodeE5M2>(kernels, Code::kE5M2);
  kernels.keys[static_cast<int>(Code::kInt8)] = MakeKeyKernel<CodeInt8>();
  kernels.values[static_cast<int>(Code::kInt8)] = {Accumulate<CodeInt8Values>};
  SetNarrow<Code::kInt6, Code::kInt5, Code::kInt4, Code::kInt3, Code::kInt2, Code::kUint4, Code::kUint3, Code::kUint2,
            Code::kE2M1>(kernels);
  SetUnpacked<Code::kLloyd4, Code::kLloyd3>(kernels);
  SetTiled<Code::kUint4, Code::kUint2>(kernels);
  kernels.transform = TransformRow;
  kernels.turn = Turn;
  kernels.softmax = Softmax;
  kernels.merge = Merge;
  kernels.normalize = Normalize;
  return kernels;
}

constexpr AttentionKernels kAttentionKernels = MakeAttentionKernels();

}  // namespace
}  // namespace kvanta::kernels
