// Time of a step, predicted from its work by what the last steps took. Weights are read once in a step, so its first
// rows cost little more than one; from some number on, every row costs the same. The model is linear in its
// coefficients, which a Kalman filter follows:
//
//   seconds = load * (a + b rows + c pairs + d loads + e logits + a correction that is linear between powers of 2 rows)
//
// Compare the cost models that Sarathi-Serve (OSDI'24) fits offline; this one is fitted while the engine runs, because
// what it depends on (model, formats, contexts, neighbours on the machine) is known only then.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/kv_cache_spec.h"

namespace kvanta::scheduler {

// Work of a step, as far as its time depends on it. Attention counts averages over layers: in a layer with a window,
// what lies in it.
struct StepWork {
  double rows = 0;    // tokens: rows of linear layers
  double loads = 0;   // cached tokens that are read, of every sequence once
  double pairs = 0;   // (query, key) pairs
  double logits = 0;  // rows of logits
};

class StepTimeModel {
 public:
  explicit StepTimeModel(const cache::KvCacheSpec& spec);

  // Adds tokens [start, start + tokens) of a sequence, `logits` of which have logits.
  void Add(StepWork& work, int64_t start, int64_t tokens, int64_t logits) const noexcept;
  // Seconds of a step; 0 until one was recorded.
  double Seconds(const StepWork& work) const noexcept;
  // A step took `seconds`. One that took far longer than the steps before, because the process was stopped, changes
  // little: it counts as far as the model itself is uncertain.
  void Record(const StepWork& work, double seconds) noexcept;
  // The most rows of a recorded step: beyond a small multiple, a prediction is a guess.
  int64_t MeasuredRows() const noexcept { return static_cast<int64_t>(measured_rows_); }

 private:
  static constexpr int kLinear = 5;  // 1, rows, pairs, loads, logits
  static constexpr int kKnots = 14;  // corrections at 1, 2, 4, .. 8,192 rows
  static constexpr int kSize = kLinear + kKnots;
  // A step's factors of the coefficients: the linear ones, and those of two neighbouring corrections.
  struct Features {
    std::array<double, kLinear> linear;
    int knot = 0;
    double upper = 0;  // share of knot + 1; the rest is of knot

    template <class Visit>
    void ForEach(Visit visit) const {
      for (int i = 0; i < kLinear; ++i) visit(i, linear[static_cast<size_t>(i)]);
      visit(kLinear + knot, 1 - upper);
      if (upper > 0) visit(kLinear + knot + 1, upper);
    }
  };
  struct Group {
    cache::Visibility visibility;
    double share = 0;  // of the layers
  };

  Features FeaturesOf(const StepWork& work) const noexcept;
  double Unloaded(const Features& features) const noexcept;
  void Begin(const StepWork& work, double seconds) noexcept;
  double& Covariance(int i, int j) noexcept {
    return covariance_[static_cast<size_t>(i) * kSize + static_cast<size_t>(j)];
  }

  std::vector<Group> groups_;
  std::array<double, kSize> coefficients_ = {};
  std::array<double, kSize> deviation_ = {};          // of the coefficients before anything is known
  std::array<double, kSize* kSize> covariance_ = {};  // of the coefficients
  double load_ = 1;                                   // time of the last steps / that of the coefficients
  double measured_rows_ = 0;
  double best_row_ = 0;  // the least seconds of a row in a step
};

}  // namespace kvanta::scheduler
