// The lists of CUDA kernels: encoders of Append, derived from the list of formats, and key/value pairs of Attend.
#pragma once

#include <type_traits>

#include "formats/all.h"
#include "kernels/attention/cuda/kv_type_desc.h"

namespace kvanta::formats {
struct LayerScheme;
}

namespace kvanta::kernels::cuda {

using formats::TypeList;

// True if T and U have the same encoder: they write the same bytes.
template <class T, class U>
constexpr bool EncodeAlike() {
  if constexpr ((T::kScaling.token_group != 0) != (U::kScaling.token_group != 0)) {
    return false;
  } else if constexpr (T::kScaling.token_group != 0) {
    return &T::EncodeTokenGroup == &U::EncodeTokenGroup;
  } else {
    return &T::EncodeRow == &U::EncodeRow;
  }
}

// True if T and U have the same decoder.
template <class T, class U>
constexpr bool ReadAlike() {
  return T::kElementType == U::kElementType && T::kScaling == U::kScaling;
}

// Encoders of the formats in a list, each once; V's of a name follow K's.
template <class Found, class... T>
struct Encoders {
  using Type = Found;
};
template <class... Found, class... More>
struct Encoders<TypeList<Found...>, void, More...> : Encoders<TypeList<Found...>, More...> {};
template <class... Found, class T, class... More>
struct Encoders<TypeList<Found...>, T, More...>
    : Encoders<std::conditional_t<(EncodeAlike<Found, T>() || ...), TypeList<Found...>, TypeList<Found..., T>>,
               More...> {};
template <class... T>
auto EncodersOf(TypeList<T...>) -> typename Encoders<TypeList<>, T..., typename T::Values...>::Type;
using AppendFormats = decltype(EncodersOf(formats::FormatList{}));

// Encoders of K and V of a name where they differ, if its pages are encoded when they close: in one launch.
template <class Keys, class Values>
struct EncoderPair;
template <class T>
inline constexpr bool kHasEncoderPair = !std::is_void_v<typename T::Values> && T::kExact == ExactPages::kOpen;
template <class Found, class... T>
struct WithPairs {
  using Type = Found;
};
template <class... Found, class T, class... More>
struct WithPairs<TypeList<Found...>, T, More...>
    : WithPairs<std::conditional_t<kHasEncoderPair<T>, TypeList<Found..., EncoderPair<T, typename T::Values>>,
                                   TypeList<Found...>>,
                More...> {};
template <class... T>
auto WithPairsOf(TypeList<T...>) -> typename WithPairs<AppendFormats, T...>::Type;
using AppendKernels = decltype(WithPairsOf(formats::FormatList{}));

// Formats of latents (MLA) in a list, each decoder once: one kernel reads them.
template <class Found, class... T>
struct LatentDecoders {
  using Type = Found;
};
template <class... Found, class T, class... More>
struct LatentDecoders<TypeList<Found...>, T, More...>
    : LatentDecoders<std::conditional_t<T::kMlaSupport == formats::MlaSupport::kNo || (ReadAlike<Found, T>() || ...),
                                        TypeList<Found...>, TypeList<Found..., T>>,
                     More...> {};
template <class... T>
auto LatentDecodersOf(TypeList<T...>) -> typename LatentDecoders<TypeList<>, T...>::Type;
using LatentFormats = decltype(LatentDecodersOf(formats::FormatList{}));

template <class KeyFormat, class ValueFormat, int kHeadDim>
struct PairKernel;
struct GenericKernel;
struct LatentBlock;

// Kernels that take tile groups (group_block.h, latent_block.h), too.
template <class Kernel>
inline constexpr bool kTakesGroups = false;
template <class KeyFormat, class ValueFormat, int kHeadDim>
inline constexpr bool kTakesGroups<PairKernel<KeyFormat, ValueFormat, kHeadDim>> = true;
template <>
inline constexpr bool kTakesGroups<LatentBlock> = true;

template <class Format, int kHeadDim>
using SameFormat = PairKernel<Format, Format, kHeadDim>;

// Common pairs have specialized kernels; GenericKernel reads all others, LatentBlock latents. Kernels depend on
// element types and scales only: nvfp4_4over6 reads like nvfp4.
using AttentionKernels =
    TypeList<SameFormat<formats::Bf16, 64>, SameFormat<formats::Bf16, 128>, SameFormat<formats::Bf16, 256>,
             SameFormat<formats::Fp8E4m3, 64>, SameFormat<formats::Fp8E4m3, 128>, SameFormat<formats::Fp8E4m3, 256>,
             SameFormat<formats::Int8, 64>, SameFormat<formats::Int8, 128>, SameFormat<formats::Int8, 256>,
             SameFormat<formats::Int4, 64>, SameFormat<formats::Int4, 128>, SameFormat<formats::Int4, 256>,
             SameFormat<formats::Nvfp4, 64>, SameFormat<formats::Nvfp4, 128>, SameFormat<formats::Nvfp4, 256>,
             SameFormat<formats::Mxfp4, 128>, SameFormat<formats::Int2Block, 128>, SameFormat<formats::Trellis4, 128>,
             SameFormat<formats::Trellis3, 128>, SameFormat<formats::Trellis2, 128>,
             PairKernel<formats::Klt3, formats::Trellis3, 128>, PairKernel<formats::Klt2, formats::Trellis2, 128>,
             PairKernel<formats::Int8, formats::Int4, 128>, PairKernel<formats::Kivi4, formats::Kivi4Values, 128>,
             GenericKernel, LatentBlock>;

// Index in AppendKernels, or -1: of a format, and of the pair of a K and a V format.
int FindAppend(const formats::Format& format) noexcept;
int FindAppendPair(const formats::Format& k, const formats::Format& v) noexcept;
// Index in AttentionKernels, or -1.
int FindAttend(const formats::LayerScheme& layer) noexcept;

}  // namespace kvanta::kernels::cuda
