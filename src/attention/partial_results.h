// Results of attention to a part of the tokens, before normalization, as ranks exchange them: for each rank that has
// heads a block with the states and then the sums of its heads, [rows][heads of the rank].
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/math.h"
#include "kernels/attention/cpu/table.h"

namespace kvanta::attention {

inline constexpr kernels::SoftmaxState kEmptyState = {-std::numeric_limits<float>::infinity(), 0.0F};

// Adds an attention sink, a logit without a value, to a softmax that has seen at least one token.
inline void AddSink(float sink, kernels::SoftmaxState& state) noexcept {
  state.sum += std::exp2(sink * kernels::kLog2E - state.max);
}

struct PartialResults {
  uint8_t* blocks = nullptr;  // [ranks][BlockBytes()]
  int64_t rows = 0;
  int64_t heads = 0;  // of a rank
  int64_t width = 0;  // sums of a head of a row

  int64_t BlockBytes() const noexcept {
    return StateBytes() + RoundUp(rows * heads * width * static_cast<int64_t>(sizeof(float)), kAlignment);
  }
  kernels::SoftmaxState* States(int64_t rank) const noexcept {
    return reinterpret_cast<kernels::SoftmaxState*>(blocks + rank * BlockBytes());
  }
  float* Sums(int64_t rank) const noexcept {
    return reinterpret_cast<float*>(blocks + rank * BlockBytes() + StateBytes());
  }
  // head: among those of all ranks.
  void Store(int64_t row, int64_t head, const kernels::SoftmaxState& state, const float* sums) const noexcept {
    const int64_t rank = head / heads, index = row * heads + head % heads;
    States(rank)[index] = state;
    std::copy_n(sums, width, Sums(rank) + index * width);
  }

 private:
  static constexpr int64_t kAlignment = 64;  // bytes: that of the widest vectors
  int64_t StateBytes() const noexcept {
    return RoundUp(rows * heads * static_cast<int64_t>(sizeof(kernels::SoftmaxState)), kAlignment);
  }
};

}  // namespace kvanta::attention
