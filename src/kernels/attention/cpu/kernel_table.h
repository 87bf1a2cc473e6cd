// The table of an ISA unit's attention kernels; included by isa_<isa>.cc after the unit's codes.
#pragma once

#include "kernels/attention/cpu/fp8_as_fp16.h"
#include "kernels/attention/cpu/keys.h"
#include "kernels/attention/cpu/lookup8.h"
#include "kernels/attention/cpu/operands.h"
#include "kernels/attention/cpu/softmax.h"
#include "kernels/attention/cpu/subbyte_keys.h"
#include "kernels/attention/cpu/subbyte_values.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/attention/cpu/transform.h"
#include "kernels/attention/cpu/transpose.h"
#include "kernels/attention/cpu/values.h"

namespace kvanta::kernels {
namespace {

template <class Decoder>
constexpr KeyKernel MakeKeyKernel() {
  return {QueryBytes<Decoder>, PrepareQuery<Decoder>, Score<Decoder>};
}

// Element types that are decoded to bytes by a lookup table first.
template <formats::ElementType... kElementType>
constexpr void SetLookup8(AttentionKernels& kernels) {
  ((kernels.keys[static_cast<int>(kElementType)] = {QueryBytes<CodeInt8>, PrepareLookup8<kElementType>,
                                                    ScoreLookup8<kElementType>},
    kernels.values[static_cast<int>(kElementType)] = {AccumulateLookup8<kElementType>}),
   ...);
}

template <formats::ElementType... kElementType>
constexpr void SetSubbyte(AttentionKernels& kernels) {
  ((kernels.keys[static_cast<int>(kElementType)] = {QueryBytes<SubbyteQuery>, PrepareSubbyte<kElementType>,
                                                    ScoreSubbyte<SubbyteKey<SubbyteTypeOf<kElementType>>>},
    kernels.values[static_cast<int>(kElementType)] = {AccumulateSubbyte<kElementType>}),
   ...);
}

template <formats::ElementType... kElementType>
constexpr void SetChannelScaled(AttentionKernels& kernels) {
  ((kernels.channel_scaled_keys[static_cast<int>(kElementType)] = {ChannelScaledQueryBytes, PrepareChannelScaled,
                                                                   ScoreChannelScaled<kElementType>}),
   ...);
}

template <class Decoder>
constexpr void Set(AttentionKernels& kernels, formats::ElementType code) {
  if constexpr (requires { typename Decoder::Fp16Code; }) {
    kernels.keys[static_cast<int>(code)] = {QueryBytes<Decoder>, PrepareFp8AsFp16<Decoder>, ScoreFp8AsFp16<Decoder>};
    kernels.values[static_cast<int>(code)] = {AccumulateFp8AsFp16<Decoder>};
  } else {
    kernels.keys[static_cast<int>(code)] = MakeKeyKernel<Decoder>();
    kernels.values[static_cast<int>(code)] = {Accumulate<Decoder>};
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
  kernels.keys[static_cast<int>(ElementType::kInt8)] = MakeKeyKernel<CodeInt8>();
  kernels.values[static_cast<int>(ElementType::kInt8)] = {Accumulate<CodeInt8Values>};
  SetSubbyte<ElementType::kInt6, ElementType::kInt5, ElementType::kInt4, ElementType::kInt3, ElementType::kInt2,
             ElementType::kUint4, ElementType::kUint3, ElementType::kUint2, ElementType::kE2M1>(kernels);
  SetLookup8<ElementType::kLloyd4, ElementType::kLloyd3>(kernels);
  SetChannelScaled<ElementType::kUint4, ElementType::kUint2>(kernels);
  kernels.transform = TransformRow;
  kernels.transpose = Transpose;
  kernels.softmax = Softmax;
  kernels.combine = Combine;
  kernels.normalize = Normalize;
  return kernels;
}

constexpr AttentionKernels kAttentionKernels = MakeAttentionKernels();

}  // namespace
}  // namespace kvanta::kernels
