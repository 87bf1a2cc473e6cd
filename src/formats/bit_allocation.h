// Uneven bits over the channels of a key whose calibrated transform orders them by variance: more where an error weighs
// more (reverse water-filling), in blocks of 8 channels so that a block's codes are whole bytes. docs/adr/0048.
#pragma once

#include <cstdint>
#include <span>

#include "formats/cell.h"

namespace kvanta::formats {

inline constexpr int kAllocationBlock = 8;      // channels of equal bits
inline constexpr int kMaxAllocatedBits = 7;     // bits per channel
inline constexpr int kMaxAllocatedTrellis = 4;  // blocks of more bits have scalar codes
inline constexpr float kSearchGainUnit = 4096;  // BitAllocation::gain of 1

// Bits of a head's channels, and how much an error in each of them weighs.
struct BitAllocation {
  int head_dim = 0;
  int scalar_blocks = 0;                              // first ones, of more than kMaxAllocatedTrellis bits
  int coded_blocks = 0;                               // first ones, of at least one bit; the others are always zero
  uint8_t bits[kMaxHeadDim / kAllocationBlock] = {};  // bits of each block; they never rise
  float weight[kMaxHeadDim] = {};                     // weight of a squared error in levels
  int16_t gain[kMaxHeadDim] = {};                     // its root, in the unit of the search (klt_search.h)
};

// Root mean square, in levels, of the values for which the levels of a width are made.
float AllocatedRms(int bits) noexcept;

// `deviations` [head_dim]: standard deviations of a key's transformed channels in units of what an error weighs, above
// 0 (of padding: 0), never rising. Spends `mean_bits` * head_dim bits one at a time where they lower the sum of squared
// errors most.
BitAllocation AllocateBits(std::span<const float> deviations, int mean_bits) noexcept;

// Bits for deviations 1 / (1 + 15 i / head_dim): for keys without a calibration, which caches refuse.
BitAllocation DefaultAllocation(int head_dim, int mean_bits) noexcept;

}  // namespace kvanta::formats
