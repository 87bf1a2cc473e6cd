// Short depthwise convolutions over the tokens of a sequence, as recurrent layers have them.
#pragma once

namespace kvanta::kernels {

inline constexpr int kMaxConvWidth = 8;  // taps, the token's own input included

}  // namespace kvanta::kernels
