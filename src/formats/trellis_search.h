// The search for the codes of a row (formats/trellis.h), over an instruction set's Steps; included by trellis.cc and by
// isa_<isa>.cc. All integer, so that every instruction set finds the same codes.
//
// A state is a window w. Elements are processed from the last to the first: the window of element j is
// (w(j + 1) << b | c(j)) & 255, so its predecessors are the 2^b windows w >> b | x << (8 - b). A metric is a squared
// distance in int16, in units of 2 levels squared, saturating:
//
//   cost[w]   = sat(sat(metric[w >> b] - round(q levels[w] / 128)) + round(levels[w]^2 / 2))
//   metric[u] = sat(min over x of cost[u | x << (8 - b)] + round(q^2 / 2^15));  decision[u] = the lowest such x
//
// with q = 128 * the target in levels, round(x) = floor(x + 1/2). After every 8th element of a run, metrics are reduced
// by their minimum (saturating). A first run over kJoinBits bits on either side of the string's ends, with free ends,
// finds the u at which they join; a second run begins and ends there.
#pragma once

#include <cstdint>

#include "formats/cell.h"

namespace kvanta::formats {

inline constexpr int kTrellisStates = 256;
inline constexpr float kTrellisUnit = 128;         // target of a level of 1
inline constexpr float kMaxTrellisTarget = 32640;  // 255 levels
inline constexpr int kReducedSteps = 8;
inline constexpr int kJoinBits = 48;
inline constexpr int16_t kWrongStart = 16384;  // metric of windows that a run may not begin with

namespace {

// Steps<kBits>: Run(targets, count, metrics, decisions) processes targets[count - 1] to targets[0]; metrics int16 [256
// >> kBits], decisions int16 [count][256 >> kBits] by element.
template <int kBits, class Steps>
inline __attribute__((always_inline)) void SearchTrellisOf(const int16_t* targets, int head_dim,
                                                           uint8_t* codes) noexcept {
  constexpr int kTargets = kTrellisStates >> kBits;  // values of u
  alignas(64) int16_t metrics[kTargets] = {};
  alignas(64) int16_t decisions[kMaxHeadDim * kTargets];
  const auto window_at = [&](int u, int element) {  // by which u was reached
    return u | decisions[element * kTargets + u] << (8 - kBits);
  };

  const int join = head_dim < kJoinBits / kBits ? head_dim : kJoinBits / kBits;
  Steps::Run(targets, join, metrics, decisions);
  Steps::Run(targets + head_dim - join, join, metrics, decisions);
  int u = 0;
  for (int i = 1; i < kTargets; ++i) u = metrics[i] < metrics[u] ? i : u;
  for (int element = 0; element < join; ++element) u = window_at(u, element) >> kBits;

  for (int16_t& metric : metrics) metric = kWrongStart;
  metrics[u] = 0;
  Steps::Run(targets, head_dim, metrics, decisions);
  for (int element = 0; element < head_dim; ++element) {
    const int window = window_at(u, element);
    codes[element] = static_cast<uint8_t>(window & ((1 << kBits) - 1));
    u = window >> kBits;
  }
}

template <template <int> class Steps>
inline __attribute__((always_inline)) void SearchTrellis(int bits, const int16_t* targets, int head_dim,
                                                         uint8_t* codes) noexcept {
  switch (bits) {
    case 4:
      return SearchTrellisOf<4, Steps<4>>(targets, head_dim, codes);
    case 3:
      return SearchTrellisOf<3, Steps<3>>(targets, head_dim, codes);
    default:
      return SearchTrellisOf<2, Steps<2>>(targets, head_dim, codes);
  }
}

}  // namespace
}  // namespace kvanta::formats
