// The kernels for a GPU that there are: what Append encodes, and which pairs of keys and values Attend reads. A new one
// is its line here.
#pragma once

#include "formats/all.h"

namespace kvanta::kernels::cuda {

using formats::TypeList;

// Formats whose rows stand alone; of kivi4 and kivi2, whose keys do not, there is none.
using AppendFormats = TypeList<formats::Bf16, formats::Fp16, formats::Fp8E4m3, formats::Fp8E5m2, formats::Int8,
                               formats::Int4, formats::Nvfp4, formats::Nvfp4FourOverSix>;

template <class Keys, class Values, int kHeadDim>
struct AttendPair {
  using K = Keys;
  using V = Values;
  static constexpr int kDim = kHeadDim;
};

template <class Format, int kHeadDim>
using Alike = AttendPair<Format, Format, kHeadDim>;

// What is read is a code and its scales: nvfp4_4over6 is nvfp4 to a reader.
using AttendPairs = TypeList<Alike<formats::Bf16, 64>, Alike<formats::Bf16, 128>, Alike<formats::Fp8E4m3, 64>,
                             Alike<formats::Fp8E4m3, 128>, Alike<formats::Int8, 64>, Alike<formats::Int8, 128>,
                             Alike<formats::Int4, 64>, Alike<formats::Int4, 128>, Alike<formats::Nvfp4, 64>,
                             Alike<formats::Nvfp4, 128>>;

// Index in AppendFormats, or -1.
int FindAppend(const formats::Format& format) noexcept;
// Index in AttendPairs, or -1.
int FindAttend(const formats::Format& keys, const formats::Format& values, int head_dim) noexcept;

}  // namespace kvanta::kernels::cuda
