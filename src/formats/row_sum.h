// Sums over a row whose order is part of a format, and the same on every instruction set.
#pragma once

namespace kvanta::formats {

// Sum of f(i), i = 0..n - 1, in double in eight interleaved parts; n is a multiple of 8.
template <class F>
double SumOf(int n, F f) noexcept {
  constexpr int kLanes = 8;
  double parts[kLanes] = {};
  for (int i = 0; i < n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) parts[lane] += f(i + lane);
  }
  return ((parts[0] + parts[4]) + (parts[2] + parts[6])) + ((parts[1] + parts[5]) + (parts[3] + parts[7]));
}

}  // namespace kvanta::formats
