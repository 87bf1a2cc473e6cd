#include "formats/bit_allocation.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "formats/klt_levels.h"

namespace kvanta::formats {

float AllocatedRms(int bits) noexcept {
  return kKltLevels[bits].rms;
}

void BlockBits::Count() noexcept {
  scalar_blocks = coded_blocks = 0;
  for (int block = 0; block < head_dim / kAllocationBlock; ++block) {
    scalar_blocks += bits[block] > kMaxAllocatedTrellis ? 1 : 0;
    coded_blocks += bits[block] > 0 ? 1 : 0;
  }
}

void SpendBits(std::span<const float> deviations, int mean_bits, uint8_t* bits) noexcept {
  const int blocks = static_cast<int>(deviations.size()) / kAllocationBlock;
  std::array<double, kMaxHeadDim / kAllocationBlock> variances{};
  for (int block = 0; block < blocks; ++block) {
    variances[static_cast<size_t>(block)] = BlockVariance(&deviations[static_cast<size_t>(block) * kAllocationBlock]);
  }
  std::fill_n(bits, blocks, uint8_t{0});
  for (int spent = 0; spent < mean_bits * blocks; ++spent) {
    int best = 0;
    double best_gain = -1;
    for (int block = 0; block < blocks; ++block) {
      const int known = bits[block];
      if (known == kMaxAllocatedBits) continue;
      const double gain = variances[static_cast<size_t>(block)] * (AllocatedError(known) - AllocatedError(known + 1));
      if (gain <= best_gain) continue;
      best_gain = gain;
      best = block;
    }
    ++bits[best];
  }
}

void BitAllocation::SetWeights(std::span<const float> deviations) noexcept {
  double error = 0;
  int searched = 0;
  for (int block = 0; block < head_dim / kAllocationBlock; ++block) {
    if (bits[block] == 0 || bits[block] > kMaxAllocatedTrellis) continue;
    error += BlockVariance(&deviations[static_cast<size_t>(block) * kAllocationBlock]) * AllocatedError(bits[block]);
    searched += kAllocationBlock;
  }
  const double unit = error > 0 ? std::sqrt(kMeanGainError * searched / error) : 1.0;
  const double first = deviations[0];
  const double norm = 1 / std::sqrt(first * first);
  for (int channel = 0; channel < head_dim; ++channel) {
    deviation[channel] = deviations[static_cast<size_t>(channel)];
    const double of_level = double{deviation[channel]} / double{AllocatedRms(bits[channel / kAllocationBlock])};
    weight[channel] = WeightOfLevel(of_level, norm);
    gain[channel] = GainOfLevel(of_level, unit);
  }
}

BitAllocation AllocateBits(std::span<const float> deviations, int mean_bits) noexcept {
  BitAllocation result;
  result.head_dim = static_cast<int>(deviations.size());
  SpendBits(deviations, mean_bits, result.bits);
  result.Count();
  result.SetWeights(deviations);
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
