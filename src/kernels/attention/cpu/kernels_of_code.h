// Entries of a table of attention kernels for element types with primitives in codes_<isa>.h; included by isa_<isa>.cc.
#pragma once

#include "kernels/attention/cpu/expanded_cells.h"
#include "kernels/attention/cpu/fp8_as_fp16.h"
#include "kernels/attention/cpu/keys.h"
#include "kernels/attention/cpu/lookup8.h"
#include "kernels/attention/cpu/operands.h"
#include "kernels/attention/cpu/softmax.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/attention/cpu/values.h"

namespace kvanta::kernels {
namespace {

// Kernels of an element type with primitives in codes_<isa>.h.
template <class Decoder>
constexpr KeyKernel KeyKernelOf() {
  if constexpr (requires { typename Decoder::Fp16Code; }) {
    return {QueryBytes<Decoder>, PrepareFp8AsFp16<Decoder>, ScoreFp8AsFp16<Decoder>};
  } else if constexpr (requires { typename Decoder::Expanded; }) {
    return {QueryBytes<Decoder>, PrepareQuery<Decoder>, ScoreSharedCells<Decoder>};
  } else {
    return {QueryBytes<Decoder>, PrepareQuery<Decoder>, Score<Decoder>};
  }
}
template <class Decoder>
constexpr ValueKernel ValueKernelOf() {
  ValueKernel kernel{};
  if constexpr (requires { typename Decoder::Fp16Code; }) {
    kernel.accumulate = AccumulateFp8AsFp16<Decoder>;
  } else if constexpr (requires { typename Decoder::Expanded; }) {
    kernel.accumulate = AccumulateSharedCells<Decoder>;
  } else {
    kernel.accumulate = Accumulate<Decoder>;
  }
  if constexpr (requires { requires Decoder::kPackedBySoftmax; }) kernel.softmax = Softmax<AsOperands<Decoder>>;
  return kernel;
}
template <class Decoder, class ValueDecoder = Decoder>
constexpr void Set(AttentionKernels& kernels, formats::ElementType type) {
  kernels.keys[static_cast<int>(type)] = KeyKernelOf<Decoder>();
  kernels.values[static_cast<int>(type)] = ValueKernelOf<ValueDecoder>();
}

// Sets the types from kIndex on that are expanded to E4M3.
template <class E4M3, int kIndex = 0>
constexpr void SetExpanded(AttentionKernels& kernels) {
  if constexpr (kIndex < formats::kElementTypes) {
    constexpr auto kType = static_cast<formats::ElementType>(kIndex);
    if constexpr (formats::Info(kType).decoding == formats::Decoding::kLookup8 && !formats::IsInteger(kType)) {
      constexpr KeyKernel kKeys = KeyKernelOf<E4M3>();
      kernels.keys[kIndex] = {kKeys.query_bytes, PrepareLookup8<kType, kKeys.prepare>,
                              ScoreExpanded<kType, kKeys.score>};
      kernels.values[kIndex] = {AccumulateLookup8<kType, ValueKernelOf<E4M3>().accumulate>};
    }
    SetExpanded<E4M3, kIndex + 1>(kernels);
  }
}

// Sets fp8, and the types that are expanded to it.
template <class E4M3, class E5M2>
constexpr void SetFp8(AttentionKernels& kernels) {
  Set<E4M3>(kernels, formats::ElementType::kE4M3);
  Set<E5M2>(kernels, formats::ElementType::kE5M2);
  SetExpanded<E4M3>(kernels);
}

}  // namespace
}  // namespace kvanta::kernels
