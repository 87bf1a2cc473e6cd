// Levels of klt3 and klt2 by bits and window: those of the trellis formats for 1 to 4 bits, for more a code's own
// level, which are the farther apart the farther from 0.
#pragma once

#include <algorithm>

#include "formats/bit_allocation.h"
#include "formats/trellis_levels.h"

namespace kvanta::formats {

inline constexpr int kKltUnit = 64;  // target of a level of 1 in a search
inline constexpr int kMaxKltTarget = 255 * kKltUnit;

struct KltLevels {
  TrellisLevelTable widths[kMaxAllocatedBits + 1] = {};

  constexpr const TrellisLevelTable& operator[](int bits) const noexcept { return widths[bits]; }
};

constexpr KltLevels MakeKltLevels() {
  // Lower than those of normal values (42 to 39 for 1 to 4 bits): eigen-channels of keys have far heavier tails, the
  // first ones most, and errors of clipped values weigh most.
  constexpr float kRms[] = {1, 38, 36, 33, 28, 20, 17, 15};
  KltLevels result;
  for (int bits = 1; bits <= kMaxAllocatedTrellis; ++bits) result.widths[bits] = kTrellisLevels[bits - kMinTrellisBits];
  for (int bits = 0; bits <= kMaxAllocatedBits; ++bits) result.widths[bits].rms = kRms[bits];
  for (int bits = kMaxAllocatedTrellis + 1; bits <= kMaxAllocatedBits; ++bits) {
    TrellisLevelTable& table = result.widths[bits];
    const int last = (1 << bits) - 1;
    for (int odd = 1, level = 0; odd <= last; odd += 2) {  // distance from 0, in half steps of the code
      const int parts = 4 * last - 3 * odd;                // the last level is 16 times as steep as the first
      level = std::max(level + 1, (2 * 127 * odd + parts) / (2 * parts));
      for (int window = 0; window < 256; window += last + 1) {
        table.levels[window + (last + odd) / 2] = static_cast<int8_t>(level);
        table.levels[window + (last - odd) / 2] = static_cast<int8_t>(-level);
      }
    }
  }
  return result;
}

inline constexpr KltLevels kKltLevels = MakeKltLevels();

}  // namespace kvanta::formats
