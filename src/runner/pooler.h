// Embedding of one sequence from its hidden states, chunk by chunk.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvanta/pooling.h"
#include "models/dense_modules.h"

namespace kvanta::runner {

// A mean is summed in double precision in the order of positions, so that chunks do not change a bit.
class Pooler {
 public:
  // hidden_scale: factor of the hidden states, where the model's last norm contains its inverse. modules: project what
  // is pooled; they outlive it.
  Pooler(const PoolingParams& params, int64_t hidden_size, double hidden_scale,
         std::span<const models::DenseModule> modules = {});

  // True if no token's hidden state may be missing: prefix hits have none.
  bool ReadsEveryToken() const noexcept { return params_.pooling_type == PoolingType::kMean; }
  // First of the rows that Add takes from a chunk of `tokens` tokens; tokens: none. last: it ends the sequence.
  int64_t FirstRow(int64_t tokens, bool last) const noexcept;
  // Adds the hidden states of a chunk that begins at position `start`, f32 [rows][hidden_size]. A chunk at 0 begins
  // anew, as after a preemption. Throws std::bad_alloc.
  void Add(int64_t start, std::span<const float> rows);
  // f32 [dimensions]; empty if a value is not finite. Throws std::bad_alloc.
  std::vector<float> Finish() const;

 private:
  PoolingParams params_;
  int64_t hidden_size_;
  double hidden_scale_;
  std::span<const models::DenseModule> modules_;
  std::vector<double> sum_;  // [hidden_size]; empty before the first Add
  int64_t rows_ = 0;
};

}  // namespace kvanta::runner
