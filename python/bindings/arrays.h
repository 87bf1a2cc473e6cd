// Conversion of arrays: numpy (or anything with DLPack) in, numpy out.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

namespace kvanta::python {

template <typename T, int kDimensions>
using ArrayIn = nanobind::ndarray<const T, nanobind::ndim<kDimensions>, nanobind::c_contig, nanobind::device::cpu>;
using FloatVector = ArrayIn<float, 1>;
using FloatMatrix = ArrayIn<float, 2>;
using Array3f = ArrayIn<float, 3>;
using TokenVector = ArrayIn<int32_t, 1>;

// Moves the vector into a numpy array without copying its elements.
template <typename T>
nanobind::object ToNumpy(std::vector<T> values, std::initializer_list<size_t> shape) {
  auto* owned = new std::vector<T>(std::move(values));
  const nanobind::capsule owner(owned, [](void* data) noexcept { delete static_cast<std::vector<T>*>(data); });
  return nanobind::cast(nanobind::ndarray<nanobind::numpy, T>(owned->data(), shape, owner));
}

}  // namespace kvanta::python
