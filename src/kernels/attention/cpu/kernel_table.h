// Table of an ISA unit's attention kernels; included by isa_<isa>.cc after the unit's codes.
#pragma once

#include "kernels/attention/cpu/fp8_as_fp16.h"
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

namespace kvanta::kernels {
namespace {

// Kernels of an element type with primitives in codes_<isa>.h.
template <class Decoder>
constexpr KeyKernel KeyKernelOf() {
  if constexpr (requires { typename Decoder::Fp16Code; }) {
    return {QueryBytes<Decoder>, PrepareFp8AsFp16<Decoder>, ScoreFp8AsFp16<Decoder>};
  } else {
    return {QueryBytes<Decoder>, PrepareQuery<Decoder>, Score<Decoder>};
  }
}
template <class Decoder>
constexpr ValueKernel ValueKernelOf() {
  if constexpr (requires { typename Decoder::Fp16Code; }) {
    return {AccumulateFp8AsFp16<Decoder>};
  } else {
    return {Accumulate<Decoder>};
  }
}
template <class Decoder, class ValueDecoder = Decoder>
constexpr void Set(AttentionKernels& kernels, formats::ElementType type) {
  kernels.keys[static_cast<int>(type)] = KeyKernelOf<Decoder>();
  kernels.values[static_cast<int>(type)] = ValueKernelOf<ValueDecoder>();
}

// Kernels of the element types from kIndex on that need no primitives of their own.
template <int kIndex = 0>
constexpr void SetDerived(AttentionKernels& kernels) {
  if constexpr (kIndex < formats::kElementTypes) {
    constexpr auto kType = static_cast<formats::ElementType>(kIndex);
    if constexpr (IsSubbyte(kType)) {
      kernels.keys[kIndex] = {QueryBytes<SubbyteQuery>, PrepareSubbyte<kType>,
                              ScoreSubbyte<SubbyteKey<SubbyteTypeOf<kType>>>};
      kernels.values[kIndex] = {AccumulateSubbyte<kType>};
    }
    if constexpr (IsUnsigned(kType))
      kernels.channel_scaled_keys[kIndex] = {ChannelScaledQueryBytes, PrepareChannelScaled, ScoreChannelScaled<kType>};
    if constexpr (formats::IsTrellis(kType)) {
      constexpr int kBits = formats::CodeBits(kType);
      kernels.keys[kIndex] = {QueryBytes<CodeInt8x8>, PrepareQuery<CodeInt8x8>, ScoreTrellis<kBits>};
      kernels.values[kIndex] = {AccumulateTrellis<kType>};
    }
    if constexpr (formats::IsAllocated(kType)) {  // keys alone
      kernels.keys[kIndex] = {QueryBytes<CodeInt8>, PrepareQuery<CodeInt8>, ScoreKlt<formats::CodeBits(kType)>};
    }
    if constexpr (formats::Info(kType).decoding == formats::Decoding::kLookup8) {
      if constexpr (formats::IsInteger(kType)) {
        kernels.keys[kIndex] = {QueryBytes<CodeInt8>, PrepareLookup8<kType, PrepareQuery<CodeInt8>>,
                                ScoreLookup8<kType>};
        kernels.values[kIndex] = {AccumulateLookup8<kType, Accumulate<CodeInt8Values>>};
      } else {
        constexpr KeyKernel kKeys = KeyKernelOf<CodeE4M3>();
        kernels.keys[kIndex] = {kKeys.query_bytes, PrepareLookup8<kType, kKeys.prepare>,
                                ScoreExpanded<kType, kKeys.score>};
        kernels.values[kIndex] = {AccumulateLookup8<kType, ValueKernelOf<CodeE4M3>().accumulate>};
      }
    }
    SetDerived<kIndex + 1>(kernels);
  }
}

constexpr AttentionKernels MakeAttentionKernels() {
  using formats::ElementType;
  AttentionKernels kernels{};
  Set<CodeFp32>(kernels, ElementType::kFp32);
  Set<CodeBf16>(kernels, ElementType::kBf16);
  Set<CodeFp16>(kernels, ElementType::kFp16);
  Set<CodeE4M3>(kernels, ElementType::kE4M3);
  Set<CodeE5M2>(kernels, ElementType::kE5M2);
  Set<CodeInt8, CodeInt8Values>(kernels, ElementType::kInt8);
  SetDerived(kernels);
  kernels.search_trellis = kTrellisSearch;
  kernels.search_klt = kKltSearch;
  kernels.transform = TransformRow;
  kernels.multiply = MultiplyRow;
  kernels.transpose = Transpose;
  kernels.softmax = Softmax;
  kernels.combine = Combine;
  kernels.normalize = Normalize;
  return kernels;
}

constexpr AttentionKernels kAttentionKernels = MakeAttentionKernels();

}  // namespace
}  // namespace kvanta::kernels
