#include "kernels/cuda/kernel_list.h"

#include "kernels/cuda/launch.h"

namespace kvanta::kernels::cuda {
namespace {

template <class T>
bool Reads(const formats::Format& format) noexcept {
  return T::kCode == format.code && T::kScaling == format.scaling;
}

// One function, the same bytes.
template <class T>
bool Encodes(const formats::Format& format) noexcept {
  if constexpr (T::kScaling.tile != 0) {
    return format.encode_tile == &T::EncodeTile;
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

struct Wanted {
  const formats::Format& keys;
  const formats::Format& values;
  int head_dim;
  int page_size;
};

template <class Keys, class Values, int kHeadDim>
bool Attends(const PairKernel<Keys, Values, kHeadDim>* /*kernel*/, const Wanted& wanted) noexcept {
  return Reads<Keys>(wanted.keys) && Reads<Values>(wanted.values) && wanted.head_dim == kHeadDim &&
         wanted.page_size >= kChunkTokens;
}
bool Attends(const AnyKernel* /*kernel*/, const Wanted& wanted) noexcept {
  return HasKeyCode(wanted.keys.code, wanted.keys.scaling) && HasValueCode(wanted.values.code, wanted.values.scaling) &&
         wanted.head_dim <= kMostHeadDim;
}

template <class... Kernel>
int FindKernel(TypeList<Kernel...> /*list*/, const Wanted& wanted) noexcept {
  int index = 0;
  int found = -1;
  ((found < 0 && Attends(static_cast<const Kernel*>(nullptr), wanted) ? found = index : 0, ++index), ...);
  return found;
}

}  // namespace

int FindAppend(const formats::Format& format) noexcept {
  return FindEncoder(AppendFormats{}, format);
}

int FindAttend(const formats::Format& keys, const formats::Format& values, int head_dim, int page_size) noexcept {
  return FindKernel(AttendPairs{}, {.keys = keys, .values = values, .head_dim = head_dim, .page_size = page_size});
}

}  // namespace kvanta::kernels::cuda
