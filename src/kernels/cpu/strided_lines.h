// The lines of a cell that a code's dot goes over; included by codes_<isa>.h.
#pragma once

#include <cstdint>

namespace kvanta::kernels {
namespace {

// `count` lines of 16 lanes, `stride` bytes apart. A dot may take several runs, `beside` bytes apart, at a time, which
// meet the same coefficients: a coefficient is loaded once for all, and a sum does not wait for itself.
struct StridedLines {
  const uint8_t* lines;
  int64_t stride;
  int count;
  int64_t unrolled;
  int left;  // lanes of all runs that there are: 8 or 16 of 16, 8 to 32 of 32
};

}  // namespace
}  // namespace kvanta::kernels
