// The list of CUDA kernels: formats that Append encodes, and key/value pairs that Attend reads. A new kernel is one
// line here.
#pragma once

#include "formats/all.h"
#include "kernels/attention/cuda/kv_type_desc.h"

namespace kvanta::formats {
struct LayerScheme;
}

namespace kvanta::kernels::cuda {

using formats::TypeList;

// One format per encoder: turboquant_*'s values are int4_per_token_head's, its E4M3 keys fp8_e4m3's, mla_int4 is int4.
// Kivi4 and Kivi2 quantize closed pages of keys only.
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
using SameFormat = PairKernel<Format, Format, kHeadDim>;

// Latent (MLA) formats, all read by one kernel.
using LatentFormats =
    TypeList<formats::MlaFp8, formats::MlaInt4, formats::MlaNvfp4, formats::Fp16, formats::Fp32, formats::Bf16>;

// Common pairs have specialized kernels; GenericKernel reads all others, LatentBlock latents. Kernels depend on code
// and scales only: nvfp4_4over6 reads like nvfp4.
using AttentionKernels =
    TypeList<SameFormat<formats::Bf16, 64>, SameFormat<formats::Bf16, 128>, SameFormat<formats::Fp8E4m3, 64>,
             SameFormat<formats::Fp8E4m3, 128>, SameFormat<formats::Int8, 64>, SameFormat<formats::Int8, 128>,
             SameFormat<formats::Int4, 64>, SameFormat<formats::Int4, 128>, SameFormat<formats::Nvfp4, 64>,
             SameFormat<formats::Nvfp4, 128>, GenericKernel, LatentBlock>;

// Index in AppendFormats, or -1.
int FindAppend(const formats::Format& format) noexcept;
// Index in AttentionKernels, or -1.
int FindAttend(const formats::LayerScheme& layer) noexcept;

}  // namespace kvanta::kernels::cuda
