#include "kernels/attention/cuda/kernel_list.h"

#include <array>
#include <type_traits>

#include "formats/scheme.h"
#include "kernels/attention/cuda/attention_params.h"

namespace kvanta::kernels::cuda {
namespace {

template <class T>
bool Reads(const formats::Format& format) noexcept {
  return T::kElementType == format.code && T::kScaling == format.scaling;
}

// Index in AppendFormats of the encoder of a type, or -1.
template <class T, class... Encoder>
constexpr int IndexOf(TypeList<Encoder...> /*list*/) noexcept {
  int index = 0;
  int found = -1;
  ((EncodeAlike<T, Encoder>()&& found < 0 ? found = index : 0, ++index), ...);
  return found;
}
struct EncoderIndices {
  int keys = -1;
  int values = -1;
};
template <class T>
constexpr EncoderIndices IndicesOf() noexcept {
  EncoderIndices indices{.keys = IndexOf<T>(AppendFormats{})};
  if constexpr (!std::is_void_v<typename T::Values>) indices.values = IndexOf<typename T::Values>(AppendFormats{});
  return indices;
}
template <class... T>
constexpr std::array<EncoderIndices, sizeof...(T)> MakeIndices(TypeList<T...> /*list*/) noexcept {
  return {IndicesOf<T>()...};
}
// In the order of formats::All(). Comparing encoders here would compile each a second time.
constexpr auto kEncoders = MakeIndices(formats::FormatList{});

template <class... T>
constexpr std::array<bool, sizeof...(T)> FindPairs(TypeList<T...> /*list*/) noexcept {
  return {kHasEncoderPair<T>...};
}
constexpr auto kHasPair = FindPairs(formats::FormatList{});
template <class... T>
constexpr int Size(TypeList<T...> /*list*/) noexcept {
  return sizeof...(T);
}

bool EncodesAlike(const formats::Format& a, const formats::Format& b) noexcept {
  return a.encode_row == b.encode_row && a.encode_token_group == b.encode_token_group;
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
  for (size_t i = 0; i < kEncoders.size(); ++i) {
    const formats::Format& keys = formats::All()[i];
    if (EncodesAlike(keys, format)) return kEncoders[i].keys;
    if (keys.value_side != nullptr && EncodesAlike(*keys.value_side, format)) return kEncoders[i].values;
  }
  return -1;
}

int FindAppendPair(const formats::Format& k, const formats::Format& v) noexcept {
  int index = Size(AppendFormats{});
  for (size_t i = 0; i < kHasPair.size(); ++i) {
    if (!kHasPair[i]) continue;
    const formats::Format& keys = formats::All()[i];
    if (EncodesAlike(keys, k) && EncodesAlike(*keys.value_side, v)) return index;
    ++index;
  }
  return -1;
}

int FindAttend(const formats::LayerScheme& layer) noexcept {
  return FindKernel(AttentionKernels{}, layer);
}

}  // namespace kvanta::kernels::cuda
