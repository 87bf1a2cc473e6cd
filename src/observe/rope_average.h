// Moments of keys and queries at all positions, from the moments before RoPE (docs/adr/0061).
#pragma once

#include <complex>
#include <cstdint>
#include <span>
#include <vector>

#include "models/config/config.h"

namespace kvanta::observe {

// RoPE rotates a pair of channels, as a complex number, by position * frequency. A second moment of rotated rows is
// then one of rows before RoPE times e^(i p (a - b)) and e^(i p (a + b)), whose sums over p are geometric.
class RopeAverage {
 public:
  // Averages over the positions from 0 to each of `context_lengths`, which have equal weight. `positions`: of the
  // engine whose rows Undo() gets, which longrope depends on; table_rows: the number of those rows.
  RopeAverage(const models::RopeSpec& rope, int head_dim, std::span<const int64_t> context_lengths, int64_t positions,
              int64_t table_rows);

  // Undoes RoPE's rotation of a row [head_dim] at `position` < table_rows, but not the scale of yarn and longrope.
  void Undo(int64_t position, double* row) const noexcept;
  // Replaces a sum of rows before RoPE [head_dim] by its average over the positions.
  void AverageSum(double* sum) const noexcept;
  // Replaces a symmetric sum of x x^T over rows x before RoPE [head_dim][head_dim].
  void AverageMoment(double* moment) const noexcept;

 private:
  // Channels of a pair, and of those that no pair has.
  int Low(int pair) const noexcept { return interleaved_ ? 2 * pair : pair; }
  int High(int pair) const noexcept { return interleaved_ ? 2 * pair + 1 : pair + pairs_; }

  int head_dim_, pairs_;
  bool interleaved_;
  std::vector<float> cos_sin_;                  // [table_rows][2][pairs], as the model's table
  std::vector<std::complex<double>> rotation_;  // [pairs]: mean of e^(i p a)
  // [pairs][pairs]: means of e^(i p (a - b)) and of e^(i p (a + b)).
  std::vector<std::complex<double>> difference_rotation_, sum_rotation_;
};

}  // namespace kvanta::observe
