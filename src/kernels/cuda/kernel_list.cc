#include "kernels/cuda/kernel_list.h"

namespace kvanta::kernels::cuda {
namespace {

template <class T>
bool Reads(const formats::Format& format) noexcept {
  return T::kCode == format.code && T::kScaling == format.scaling;
}

template <class... T>
int FindName(TypeList<T...> /*list*/, const formats::Format& format) noexcept {
  int index = 0;
  int found = -1;
  ((T::kName == format.name&& found < 0 ? found = index : 0, ++index), ...);
  return found;
}

template <class... Pair>
int FindPair(TypeList<Pair...> /*list*/, const formats::Format& keys, const formats::Format& values,
             int head_dim) noexcept {
  int index = 0;
  int found = -1;
  ((Reads<typename Pair::K>(keys) && Reads<typename Pair::V>(values)&& Pair::kDim == head_dim&& found < 0
        ? found = index
        : 0,
    ++index),
   ...);
  return found;
}

}  // namespace

int FindAppend(const formats::Format& format) noexcept {
  return FindName(AppendFormats{}, format);
}

int FindAttend(const formats::Format& keys, const formats::Format& values, int head_dim) noexcept {
  return FindPair(AttendPairs{}, keys, values, head_dim);
}

}  // namespace kvanta::kernels::cuda
