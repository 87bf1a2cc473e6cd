#include "kernels/attention/cuda/kernel_list.h"

#include "formats/scheme.h"
#include "kernels/attention/cuda/attention_params.h"

namespace kvanta::kernels::cuda {
namespace {

template <class T>
bool Reads(const formats::Format& format) noexcept {
  return T::kElementType == format.code && T::kScaling == format.scaling;
}

// Formats with the same encoder produce the same bytes.
template <class T>
bool Encodes(const formats::Format& format) noexcept {
  if constexpr (T::kScaling.token_group != 0) {
    return format.encode_token_group == &T::EncodeTokenGroup;
  } else {
    return format.encode_row == &T::EncodeRow;
  }
}

template <class... T>
int FindEncoder(TypeList<T...> /*list*/, const formats::Format& format) noexcept {
  int index = 0;
  int found = -1;
  ((Encodes<T>(format)&& found < 0 ? found = index : 0, ++index), ...);
  return found;
}

template <class Keys, class Values, int kHeadDim>
bool Attends(const PairKernel<Keys, Values, kHeadDim>* /*kernel*/, const formats::LayerScheme& layer) noexcept {
  // Kernels without a quantized side read one record.
  constexpr bool kUnquantized =
      Keys::kElementType == formats::ElementType::kBf16 && Values::kElementType == formats::ElementType::kBf16;
  return !(kUnquantized && layer.exact_open) && Reads<Keys>(*layer.k.format) && Reads<Values>(*layer.v.format) &&
         layer.UnquantizedShape().head_dim == 0 && layer.shape.head_dim == kHeadDim &&
         layer.shape.tokens >= kChunkTokens;
}
bool Attends(const GenericKernel* /*kernel*/, const formats::LayerScheme& layer) noexcept {
  return !layer.SharesCell() && CanDecodeKeys(layer.k.format->code, layer.k.format->scaling) &&
         CanDecodeValues(layer.v.format->code, layer.v.format->scaling) && layer.shape.head_dim <= kMaxHeadDim &&
         layer.k.outliers <= kMaxOutliers;
}

template <class... Format>
bool ReadsOne(TypeList<Format...> /*list*/, const formats::Format& format) noexcept {
  return (Reads<Format>(format) || ...);
}
bool Attends(const LatentBlock* /*kernel*/, const formats::LayerScheme& layer) noexcept {
  return layer.SharesCell() && ReadsOne(LatentFormats{}, *layer.k.format) && layer.shape.head_dim <= kMaxLatentRank &&
         layer.rope_dim <= kMaxRopeDim;
}

template <class... Kernel>
int FindKernel(TypeList<Kernel...> /*list*/, const formats::LayerScheme& layer) noexcept {
  int index = 0;
  int found = -1;
  ((found < 0 && Attends(static_cast<const Kernel*>(nullptr), layer) ? found = index : 0, ++index), ...);
  return found;
}

}  // namespace

int FindAppend(const formats::Format& format) noexcept {
  return FindEncoder(AppendFormats{}, format);
}

int FindAttend(const formats::LayerScheme& layer) noexcept {
  return FindKernel(AttentionKernels{}, layer);
}

}  // namespace kvanta::kernels::cuda
