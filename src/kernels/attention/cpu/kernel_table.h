// Table of an ISA unit's attention kernels; included by isa_<isa>.cc after the unit's codes.
#pragma once

#include "kernels/attention/cpu/combine.h"
#include "kernels/attention/cpu/kernels_of_code.h"
#include "kernels/attention/cpu/keys.h"
#include "kernels/attention/cpu/klt.h"
#include "kernels/attention/cpu/lookup8.h"
#include "kernels/attention/cpu/operands.h"
#include "kernels/attention/cpu/softmax.h"
#include "kernels/attention/cpu/subbyte_keys.h"
#include "kernels/attention/cpu/subbyte_values.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/attention/cpu/transform.h"
#include "kernels/attention/cpu/transpose.h"
#include "kernels/attention/cpu/trellis.h"
#include "kernels/attention/cpu/values.h"
#include "kernels/attention/cpu/weighted_scores.h"
#include "kernels/cpu/prefetcher.h"

namespace kvanta::kernels {
namespace {

// Kernels of the element types from kIndex on that need no primitives of their own.
template <int kIndex = 0>
constexpr void SetDerived(AttentionKernels& kernels) {
  if constexpr (kIndex < formats::kElementTypes) {
    constexpr auto kType = static_cast<formats::ElementType>(kIndex);
    if constexpr (IsSubbyte(kType)) {
      kernels.keys[kIndex] = {QueryBytes<SubbyteQuery>, PrepareSubbyte<kType>,
                              ScoreSubbyte<SubbyteKey<SubbyteTypeOf<kType>>>};
      kernels.values[kIndex] = {.accumulate = AccumulateSubbyte<kType>, .load = LoadSubbyte<kType>};
    }
    if constexpr (IsUnsigned(kType))
      kernels.channel_scaled_keys[kIndex] = {ChannelScaledQueryBytes, PrepareChannelScaled, ScoreChannelScaled<kType>};
    if constexpr (formats::IsTrellis(kType)) {
      constexpr int kBits = formats::CodeBits(kType);
      kernels.keys[kIndex] = {QueryBytes<CodeInt8x8>, PrepareQuery<CodeInt8x8>, ScoreTrellis<kBits>};
      kernels.values[kIndex] = {AccumulateTrellis<kType>};
    }
    if constexpr (formats::IsAllocated(kType)) {  // keys alone
      constexpr int kBits = formats::CodeBits(kType);
      kernels.keys[kIndex] = {QueryBytes<CodeInt8>, PrepareQuery<CodeInt8>, ScoreKlt<kBits>};
      kernels.channel_scaled_keys[kIndex] = {ChannelScaledQueryBytes, PrepareChannelScaled, ScoreKltGroups<kBits>};
    }
    if constexpr (formats::Info(kType).decoding == formats::Decoding::kLookup8 && formats::IsInteger(kType)) {
      kernels.keys[kIndex] = {QueryBytes<CodeInt8>, PrepareLookup8<kType, PrepareQuery<CodeInt8>>, ScoreLookup8<kType>};
      kernels.values[kIndex] = {AccumulateLookup8<kType, Accumulate<CodeInt8Values>>};
    }
    SetDerived<kIndex + 1>(kernels);
  }
}

constexpr AttentionKernels MakeAttentionKernels() {
  using formats::ElementType;
  AttentionKernels kernels{};
  Set<CodeFp32>(kernels, ElementType::kFp32);
  Set<CodeBf16>(kernels, ElementType::kBf16);
  kernels.exact_keys = kernels.keys[static_cast<int>(ElementType::kBf16)];
  kernels.exact_values = kernels.values[static_cast<int>(ElementType::kBf16)];
  Set<CodeFp16>(kernels, ElementType::kFp16);
  SetFp8<CodeE4M3, CodeE5M2>(kernels);
  Set<CodeInt8, CodeInt8Values>(kernels, ElementType::kInt8);
  SetDerived(kernels);
  kernels.search_trellis = kTrellisSearch;
  kernels.search_klt = kKltSearch;
  kernels.transform = TransformRow;
  kernels.multiply = MultiplyRow;
  kernels.transpose = Transpose;
  kernels.softmax = Softmax<InPlace>;
  kernels.combine = Combine;
  kernels.normalize = Normalize;
  kernels.add_weighted_scores = AddWeightedScores;
  kernels.two_part_prefetch_bytes = kTwoPartPrefetchBytes;
  return kernels;
}

constexpr AttentionKernels kAttentionKernels = MakeAttentionKernels();

}  // namespace
}  // namespace kvanta::kernels
