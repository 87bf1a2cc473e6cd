// Inputs of a recurrent layer in the drafted rows of a step, over which its states advance once it is known which of
// them are accepted (docs/adr/0087).
#pragma once

#include <cstdint>

#include "base/device.h"
#include "cache/recurrent_state.h"
#include "kernels/ops.h"

namespace kvanta::models {

class DraftRows {
 public:
  DraftRows(Device& device, int64_t rows, int64_t width)
      : width_(width), rows_(device.Allocate(static_cast<size_t>(rows * width) * sizeof(float))) {}

  int64_t Width() const noexcept { return width_; }
  // f32 [rows][Width()]: those of the step's drafted segments, in order.
  float* Rows() const noexcept { return rows_.as<float>(); }

  // Copies `count` floats of each drafted row to floats [column, column + count) of the rows here. `from`: of the
  // step's row 0; its rows are `stride` floats apart.
  void Keep(kernels::Ops& ops, const cache::StateStep& states, const float* from, int64_t stride, int64_t count,
            int64_t column) noexcept {
    float* to = Rows() + column;
    for (const cache::StateSegment& segment : states.segments) {
      if (segment.to != cache::kNoPage) continue;
      ops.Copy(from + segment.first_row * stride, stride, segment.tokens, count, to, width_);
      to += segment.tokens * width_;
    }
  }

  // Rows that AdvanceStates reads.
  static int64_t Count(const cache::StateStep& states) noexcept {
    return states.segments.back().first_row + states.segments.back().tokens;
  }

 private:
  int64_t width_;
  Buffer rows_;
};

}  // namespace kvanta::models
