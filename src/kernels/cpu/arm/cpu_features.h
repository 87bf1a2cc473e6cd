// CPU features of aarch64 that select an ISA unit.
#pragma once

namespace kvanta::kernels {

// Extensions that the CPU has and Linux reports; NEON is part of aarch64.
struct CpuFeatures {
  bool dotprod = false;  // FEAT_DotProd
  bool i8mm = false;     // FEAT_DotProd, FEAT_I8MM, FEAT_BF16
};

const CpuFeatures& DetectCpuFeatures();

}  // namespace kvanta::kernels
