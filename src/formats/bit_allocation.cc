#include "formats/bit_allocation.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "formats/klt_levels.h"

namespace kvanta::formats {
namespace {

// Expected squared error of a unit normal value in 0 to 7 bits of a row.
constexpr std::array<double, kMaxAllocatedBits + 1> kErrors = {1, .363, .119, .0384, .0125, .0043, .00135, .0005};
constexpr double kMeanGainError = 128;  // mean of (gain * error in levels)^2: some 8 units of the search's metric

}  // namespace

float AllocatedRms(int bits) noexcept {
  return kKltLevels[bits].rms;
}

BitAllocation AllocateBits(std::span<const float> deviations, int mean_bits) noexcept {
  BitAllocation result;
  result.head_dim = static_cast<int>(deviations.size());
  const int blocks = result.head_dim / kAllocationBlock;
  const auto variance_at = [&](int channel) {
    const double deviation = deviations[static_cast<size_t>(channel)];
    return deviation * deviation;
  };
  std::array<double, kMaxHeadDim / kAllocationBlock> variances{};
  for (int channel = 0; channel < result.head_dim; ++channel) {
    variances[static_cast<size_t>(channel / kAllocationBlock)] += variance_at(channel);
  }
  for (int spent = 0; spent < mean_bits * blocks; ++spent) {
    int best = 0;
    double best_gain = -1;
    for (int block = 0; block < blocks; ++block) {
      const size_t bits = result.bits[block];
      if (bits == kMaxAllocatedBits) continue;
      const double gain = variances[static_cast<size_t>(block)] * (kErrors[bits] - kErrors[bits + 1]);
      if (gain <= best_gain) continue;
      best_gain = gain;
      best = block;
    }
    ++result.bits[best];
  }
  double error = 0;
  int searched = 0;
  for (int block = 0; block < blocks; ++block) {
    result.scalar_blocks += result.bits[block] > kMaxAllocatedTrellis ? 1 : 0;
    result.coded_blocks += result.bits[block] > 0 ? 1 : 0;
    if (result.bits[block] == 0 || result.bits[block] > kMaxAllocatedTrellis) continue;
    error += variances[static_cast<size_t>(block)] * kErrors[result.bits[block]];
    searched += kAllocationBlock;
  }
  const double unit = error > 0 ? std::sqrt(kMeanGainError * searched / error) : 1.0;
  const double norm = 1 / std::sqrt(variance_at(0));
  for (int channel = 0; channel < result.head_dim; ++channel) {
    const double deviation = double{deviations[static_cast<size_t>(channel)]} /
                             double{AllocatedRms(result.bits[channel / kAllocationBlock])};
    result.weight[channel] = static_cast<float>(deviation * norm * (deviation * norm));
    const double gain = std::floor(deviation * unit * double{kSearchGainUnit} + 0.5);
    result.gain[channel] = static_cast<int16_t>(std::clamp(gain, 1.0, 32767.0));
  }
  return result;
}

BitAllocation DefaultAllocation(int head_dim, int mean_bits) noexcept {
  std::array<float, kMaxHeadDim> deviations{};
  for (int i = 0; i < head_dim; ++i) {
    deviations[static_cast<size_t>(i)] = static_cast<float>(1 / (1 + 15 * static_cast<double>(i) / head_dim));
  }
  return AllocateBits(std::span(deviations).first(static_cast<size_t>(head_dim)), mean_bits);
}

}  // namespace kvanta::formats
