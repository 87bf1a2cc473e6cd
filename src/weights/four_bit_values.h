// Values of the 4-bit codes that are looked up.
#pragma once

namespace kvanta::weights {

struct FourBitValues {
  alignas(64) float of[16];
};

// bitsandbytes' NF4: arXiv:2305.14314, appendix E.
inline constexpr FourBitValues kNf4Values = {{
    -1.0F,
    -0.6961928009986877F,
    -0.5250730514526367F,
    -0.39491748809814453F,
    -0.28444138169288635F,
    -0.18477343022823334F,
    -0.09105003625154495F,
    0.0F,
    0.07958029955625534F,
    0.16093020141124725F,
    0.24611230194568634F,
    0.33791524171829224F,
    0.44070982933044434F,
    0.5626170039176941F,
    0.7229568362236023F,
    1.0F,
}};
// E2M1.
inline constexpr FourBitValues kFp4Values = {
    {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F, -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F}};

}  // namespace kvanta::weights
