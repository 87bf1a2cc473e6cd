// CPU features of x86-64 that select an ISA unit.
#pragma once

namespace kvanta::kernels {

// Instruction sets that the CPU has and whose registers the operating system saves.
struct CpuFeatures {
  bool avx2 = false;              // AVX2, FMA, F16C, BMI2
  bool avx512 = false;            // AVX2 and AVX-512 F, BW, VL, DQ, VBMI, VNNI
  bool avx512_bf16 = false;       // AVX-512 and BF16
  bool fast_avx512_bf16 = false;  // the same, and vdpbf16ps takes no longer than an f32 multiply-add
  bool avx512_fp16 = false;       // AVX-512 and FP16
  bool amx = false;               // AVX-512 with BF16 and AMX TILE, INT8, BF16
};

const CpuFeatures& DetectCpuFeatures();

// Requests permission to use AMX tiles, once for all threads of the process; false if Linux refuses. The permission is
// permanent, and from then on every thread's signal stack must be large enough for the tile state, so request it only
// where the AMX unit will be used.
bool RequestAmxPermission();

}  // namespace kvanta::kernels
