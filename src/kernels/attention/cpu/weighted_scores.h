// Scores of an indexer: sums over its heads; included by isa_<isa>.cc after the unit's Vec16.
#pragma once

#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

void AddWeightedScores(const float* scores, const float* weights, int rows, int groups, float* out) {
  for (int group = 0; group < groups; ++group, out += 16, scores += 16) {
    Vec16::F sum = Vec16::Load(out);
    const float* of_row = scores;
    for (int row = 0; row < rows; ++row, of_row += kMaxPageTokens) {
      // Max() of NaN and 0 is 0.
      sum = Vec16::Add(sum, Vec16::Mul(Vec16::Set1(weights[row]), Vec16::Max(Vec16::Load(of_row), Vec16::Zero())));
    }
    Vec16::Store(out, sum);
  }
}

}  // namespace
}  // namespace kvanta::kernels
