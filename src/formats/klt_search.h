// The search for the trellis codes of a row with uneven bits (formats/klt.h), over an instruction set's Steps; included
// by klt.cc and by isa_<isa>.cc. All integer, so that every instruction set finds the same codes.
//
// As in trellis_search.h, elements are processed from the last to the first, and a state is the window w of an element,
// whose predecessors have the window u | x << (8 - b), u = w >> b, b the element's bits. A channel's error is weighted
// by its gain g; metrics are int16, saturating:
//
//   best[u]   = min over x of metric[u | x << (8 - b)];  decision[u] = the lowest such x
//   error     = sat(8 * round((q - 64 levels[w]) g / 2^15))
//   metric[w] = sat(best[w >> b] + floor(error^2 / 2^16))
//
// with q = 64 * the target in levels. After every block of 8 elements metrics are reduced by their minimum
// (saturating). A first run over at least kJoinBits bits on either side of the string's ends, with free ends, finds the
// window at which they join; a second run begins and ends there.
#pragma once

#include <cstdint>

#include "formats/bit_allocation.h"
#include "formats/klt_levels.h"
#include "formats/trellis_search.h"

namespace kvanta::formats {

namespace {

inline constexpr int kKltDecisions = kTrellisStates / 2;  // at most, of an element

// Steps::Run<kBits>(targets, gains, metrics, decisions) processes the elements 7 to 0 of a block: metrics int16 [256],
// decisions int16 [8][kKltDecisions].
template <class Steps>
inline __attribute__((always_inline)) void RunKltBlock(const BitAllocation& allocation, int block,
                                                       const int16_t* targets, int16_t* metrics,
                                                       int16_t* decisions) noexcept {
  const int first = block * kAllocationBlock;
  const int16_t* gains = allocation.gain + first;
  int16_t* to = decisions + first * kKltDecisions;
  switch (allocation.bits[block]) {
    case 4:
      return Steps::template Run<4>(targets + first, gains, metrics, to);
    case 3:
      return Steps::template Run<3>(targets + first, gains, metrics, to);
    case 2:
      return Steps::template Run<2>(targets + first, gains, metrics, to);
    default:
      return Steps::template Run<1>(targets + first, gains, metrics, to);
  }
}

template <class Steps>
inline __attribute__((always_inline)) void SearchKlt(const BitAllocation& allocation, const int16_t* targets,
                                                     uint8_t* codes) noexcept {
  alignas(64) int16_t metrics[kTrellisStates] = {};
  alignas(64) int16_t decisions[kMaxHeadDim * kKltDecisions];
  const int begin = allocation.scalar_blocks, end = allocation.coded_blocks;
  const auto previous = [&](int window, int element) {  // the window of the element after it
    const int bits = allocation.bits[element / kAllocationBlock];
    const int u = window >> bits;
    return u | decisions[element * kKltDecisions + u] << (8 - bits);
  };

  // Blocks on either side of the ends.
  int head = begin, tail = end;
  for (int bits = 0; head < end && bits < kJoinBits; ++head) bits += kAllocationBlock * allocation.bits[head];
  for (int bits = 0; tail > begin && bits < kJoinBits; --tail) bits += kAllocationBlock * allocation.bits[tail - 1];
  for (int block = head; block-- > begin;) RunKltBlock<Steps>(allocation, block, targets, metrics, decisions);
  for (int block = end; block-- > tail;) RunKltBlock<Steps>(allocation, block, targets, metrics, decisions);
  int window = 0;
  for (int w = 1; w < kTrellisStates; ++w) window = metrics[w] < metrics[window] ? w : window;
  for (int element = tail * kAllocationBlock; element < end * kAllocationBlock; ++element) {
    window = previous(window, element);
  }

  for (int16_t& metric : metrics) metric = kWrongStart;
  metrics[window] = 0;
  for (int block = end; block-- > begin;) RunKltBlock<Steps>(allocation, block, targets, metrics, decisions);
  for (int element = begin * kAllocationBlock; element < end * kAllocationBlock; ++element) {
    const int bits = allocation.bits[element / kAllocationBlock];
    codes[element] = static_cast<uint8_t>(window & ((1 << bits) - 1));
    window = previous(window, element);
  }
}

}  // namespace
}  // namespace kvanta::formats
