// Uneven bits over the channels of a key whose calibrated transform orders them by variance: more where an error weighs
// more (reverse water-filling), in blocks of 8 channels so that a block's codes are whole bytes. docs/adr/0048.
#pragma once

#include <cstdint>
#include <span>

#include "base/host_device.h"
#include "formats/cell.h"

namespace kvanta::formats {

inline constexpr int kAllocationBlock = 8;      // channels of equal bits
inline constexpr int kMaxAllocatedBits = 7;     // bits per channel
inline constexpr int kMaxAllocatedTrellis = 4;  // blocks of more bits have scalar codes
inline constexpr float kSearchGainUnit = 4096;  // BitAllocation::gain of 1

// Bits of a row's channels.
struct BlockBits {
  int head_dim = 0;
  int scalar_blocks = 0;                              // first ones, of more than kMaxAllocatedTrellis bits
  int coded_blocks = 0;                               // first ones, of at least one bit; the others are always zero
  uint8_t bits[kMaxHeadDim / kAllocationBlock] = {};  // bits of each block; they never rise

  // Sets the counts of blocks.
  void Count() noexcept;
};

// Bits of a head's channels, and how much an error in each of them weighs.
struct BitAllocation : BlockBits {
  float deviation[kMaxHeadDim] = {};  // of the channels, as given to AllocateBits()
  float weight[kMaxHeadDim] = {};     // weight of a squared error in levels
  int16_t gain[kMaxHeadDim] = {};     // its root, in the unit of the search (klt_search.h)

  // Sets deviations, weights and gains of the bits: deviations [head_dim], of which the first one is above 0.
  void SetWeights(std::span<const float> deviations) noexcept;
};

// Root mean square, in levels, of the values for which the levels of a width are made.
float AllocatedRms(int bits) noexcept;

// The arithmetic of SpendBits() and SetWeights(), the same on a GPU (kernels/attention/cuda/group_allocation.h).

// Expected squared error of a unit normal value in 0 to 7 bits of a row.
KVANTA_HD constexpr double AllocatedError(int bits) noexcept {
  constexpr double kErrors[kMaxAllocatedBits + 1] = {1, .363, .119, .0384, .0125, .0043, .00135, .0005};
  return kErrors[bits];
}

inline constexpr double kMeanGainError =
    128;  // mean of (gain * error in levels)^2: some 8 units of the search's metric

// Sum of the squares of a block's deviations [kAllocationBlock].
KVANTA_HD inline double BlockVariance(const float* deviations) noexcept {
  double variance = 0;
  for (int i = 0; i < kAllocationBlock; ++i) variance += double{deviations[i]} * double{deviations[i]};
  return variance;
}

// A channel's BitAllocation::weight and gain, of_level: the error that a level of 1 stands for.
KVANTA_HD inline float WeightOfLevel(double of_level, double norm) noexcept {
  return static_cast<float>(of_level * norm * (of_level * norm));
}
KVANTA_HD inline int16_t GainOfLevel(double of_level, double unit) noexcept {
  const double scaled = of_level * unit * double{kSearchGainUnit} + 0.5;
  return static_cast<int16_t>(scaled < 1 ? 1.0 : scaled < 32767 ? scaled : 32767.0);  // truncates: above 0
}

// Spends `mean_bits` * head_dim bits one at a time where they lower the sum of squared errors most: bits of each block
// of channels with these deviations, in any order.
void SpendBits(std::span<const float> deviations, int mean_bits, uint8_t* bits) noexcept;

// `deviations` [head_dim]: standard deviations of a key's transformed channels in units of what an error weighs, above
// 0 (of padding: 0), never rising.
BitAllocation AllocateBits(std::span<const float> deviations, int mean_bits) noexcept;

// Bits for deviations 1 / (1 + 15 i / head_dim): for keys without a calibration, which caches refuse.
BitAllocation DefaultAllocation(int head_dim, int mean_bits) noexcept;

}  // namespace kvanta::formats
