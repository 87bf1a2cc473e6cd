// The kernels for a GPU that there are: what Append encodes, and which pairs of keys and values Attend reads. A new one
// is its line here.
#pragma once

#include "formats/all.h"
#include "kernels/attention/cuda/kv_type_desc.h"

namespace kvanta::formats {
struct LayerScheme;
}

namespace kvanta::kernels::cuda {

using formats::TypeList;

// Formats, of those that encode alike one: turboquant_*'s values are int4_per_token_head's, its E4M3 keys fp8_e4m3's,
// mla_int4 is int4. Those of kivi4's and kivi2's keys encode pages that close, nothing else.
using AppendFormats =
    TypeList<formats::Fp32, formats::Bf16, formats::Fp16, formats::Fp8E4m3, formats::Fp8E5m2, formats::Fp8PerTokenHead,
             formats::Mxfp8, formats::Int8, formats::Int8Block, formats::Int6Block, formats::Int5Block, formats::Int4,
             formats::Int4PerTokenHead, formats::Int3Block, formats::Int2Block, formats::Nvfp4,
             formats::Nvfp4FourOverSix, formats::Mxfp4, formats::Fp4E2m1, formats::Kivi4, formats::Kivi4Values,
             formats::Kivi2, formats::Kivi2Values, formats::Turboquant4BitNc, formats::Turboquant3BitNc,
             formats::TurboquantValues3, formats::MlaFp8, formats::MlaNvfp4>;

template <class KeyFormat, class ValueFormat, int kHeadDim>
struct PairKernel;
struct GenericKernel;
struct LatentBlock;

template <class Format, int kHeadDim>
using Alike = PairKernel<Format, Format, kHeadDim>;

// Formats of latents (MLA), which one kernel reads.
using LatentFormats =
    TypeList<formats::MlaFp8, formats::MlaInt4, formats::MlaNvfp4, formats::Fp16, formats::Fp32, formats::Bf16>;

// Pairs that are common have kernels of their own; one more is for the rest, and one for latents. What is read is a
// code and its scales: nvfp4_4over6 is nvfp4 to a reader.
using AttendPairs = TypeList<Alike<formats::Bf16, 64>, Alike<formats::Bf16, 128>, Alike<formats::Fp8E4m3, 64>,
                             Alike<formats::Fp8E4m3, 128>, Alike<formats::Int8, 64>, Alike<formats::Int8, 128>,
                             Alike<formats::Int4, 64>, Alike<formats::Int4, 128>, Alike<formats::Nvfp4, 64>,
                             Alike<formats::Nvfp4, 128>, GenericKernel, LatentBlock>;

// Index in AppendFormats, or -1.
int FindAppend(const formats::Format& format) noexcept;
// Index in AttendPairs, or -1.
int FindAttend(const formats::LayerScheme& layer) noexcept;

}  // namespace kvanta::kernels::cuda
