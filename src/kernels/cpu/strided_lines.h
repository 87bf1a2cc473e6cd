// The lines of a cell that a Dot() multiplies; included by codes_<isa>.h.
#pragma once

#include <cstdint>

namespace kvanta::kernels {
namespace {

// `count` lines of 16 lanes, `stride` bytes apart. One Dot() may compute several such groups of 16 lanes,
// `unroll_stride` bytes apart, with the same operands: each operand is loaded once for all groups, and independent sums
// hide the latency of multiply-adds.
struct StridedLines {
  const uint8_t* first;
  int64_t stride;
  int count;
  int64_t unroll_stride;
  int left;  // valid lanes of all groups: 8 or 16 of 16, 8 to 32 of 32
};

}  // namespace
}  // namespace kvanta::kernels
