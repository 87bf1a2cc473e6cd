// Expected properties of every format, in the order of src/formats/all.h. A new format has its row here.
#pragma once

namespace kvanta::formats {

struct ExpectedFormat {
  const char* name;
  double k_bits;  // per element at head_dim 128, scales included
  double v_bits;
  bool k_hadamard;  // defaults of the name
  bool v_hadamard;
  bool open;            // exact=open
  int sink;             // exact first pages
  double k_distortion;  // mean squared error over mean square of N(0, 1), as measured with tests/oracle
  double v_distortion;
};

inline constexpr ExpectedFormat kExpectedFormats[] = {
    {"fp32", 32, 32, false, false, false, 0, 0, 0},
    {"bf16", 16, 16, false, false, false, 0, 2.77e-6, 2.77e-6},
    {"fp16", 16, 16, false, false, false, 0, 4.29e-8, 4.29e-8},
    {"fp8_e4m3", 8, 8, false, false, false, 0, 7.05e-4, 7.05e-4},
    {"fp8_e5m2", 8, 8, false, false, false, 0, 2.79e-3, 2.79e-3},
    {"fp8_per_token_head", 8.25, 8.25, false, false, false, 0, 6.62e-4, 6.62e-4},
    {"mxfp8", 8.25, 8.25, false, false, false, 0, 8.80e-4, 8.80e-4},
    {"mxfp6_e3m2", 6.25, 6.25, false, false, true, 0, 2.92e-3, 2.92e-3},
    {"int8", 8.125, 8.125, true, true, false, 0, 4.16e-5, 4.16e-5},
    {"int8_g32", 8.5, 8.5, true, true, false, 0, 2.86e-5, 2.86e-5},
    {"int6_g32", 6.5, 6.5, true, true, true, 0, 4.37e-4, 4.37e-4},
    {"int5_g32", 5.5, 5.5, true, true, true, 0, 1.78e-3, 1.78e-3},
    {"int4", 4.5, 4.5, true, true, true, 1, 7.10e-3, 7.10e-3},
    {"int4_per_token_head", 4.25, 4.25, true, true, true, 1, 9.98e-3, 9.98e-3},
    {"t4", 4.125, 4.125, true, true, true, 1, 5.73e-3, 5.73e-3},
    {"int3_g32", 3.5, 3.5, true, true, true, 1, 2.91e-2, 2.91e-2},
    {"t3", 3.125, 3.125, true, true, true, 1, 2.09e-2, 2.09e-2},
    {"klt3", 3.125, 3.125, true, true, true, 1, 5.38e-2, 2.09e-2},
    {"klt3_g64", 3.203125, 3.125, true, true, true, 1, 4.63e-2, 2.09e-2},
    {"int2_g32", 2.5, 2.5, true, true, true, 1, 0.121, 0.121},
    {"t2", 2.125, 2.125, true, true, true, 1, 7.69e-2, 7.69e-2},
    {"klt2", 2.125, 2.125, true, true, true, 1, 0.209, 7.69e-2},
    {"klt2_g64", 2.203125, 2.125, true, true, true, 1, 0.195, 7.69e-2},
    {"nvfp4", 4.5, 4.5, false, false, true, 1, 9.15e-3, 9.15e-3},
    {"nvfp4_4over6", 4.5, 4.5, false, false, true, 1, 7.62e-3, 7.62e-3},
    {"mxfp4", 4.25, 4.25, false, false, true, 1, 1.32e-2, 1.32e-2},
    {"fp4_e2m1", 4.5, 4.5, false, false, true, 1, 1.26e-2, 1.26e-2},
    {"kivi4", 5, 5, false, false, true, 1, 6.09e-3, 6.08e-3},
    {"kivi3", 4, 4, false, false, true, 1, 2.83e-2, 2.81e-2},
    {"kivi2", 3, 3, false, false, true, 1, 0.154, 0.154},
    {"turboquant_k8v4", 8, 4.25, false, false, false, 0, 7.05e-4, 9.94e-3},
    {"turboquant_4bit_nc", 4.125, 4.25, true, false, false, 0, 9.29e-3, 9.94e-3},
    {"turboquant_k3v4_nc", 3.125, 4.25, true, false, false, 0, 3.39e-2, 9.94e-3},
    {"turboquant_3bit_nc", 3.125, 3.25, true, false, false, 0, 3.39e-2, 4.56e-2},
    {"mla_fp8", 8.25, 8.25, false, false, false, 0, 6.62e-4, 6.62e-4},
    {"mla_fp8_e5m2", 8.25, 8.25, false, false, false, 0, 2.6e-3, 2.6e-3},
    {"mla_int8", 8.5, 8.5, false, false, false, 0, 2.86e-5, 2.86e-5},
    {"mla_int4", 4.5, 4.5, false, false, true, 1, 7.10e-3, 7.10e-3},
    {"mla_nvfp4", 4.5, 4.5, false, false, true, 1, 9.15e-3, 9.15e-3},
};

}  // namespace kvanta::formats
