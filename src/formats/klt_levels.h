// Levels of klt3 and klt2 by bits and window: those of the trellis formats for 1 to 4 bits, for more a code's own
// level.
#pragma once

#include "formats/bit_allocation.h"
#include "formats/trellis_levels.h"

namespace kvanta::formats {

// Half the distance of neighbouring uniform levels, which fill int8.
constexpr int UniformStep(int bits) noexcept {
  return 1 << (kMaxAllocatedBits - bits);
}

struct KltLevels {
  TrellisLevelTable widths[kMaxAllocatedBits + 1] = {};

  constexpr const TrellisLevelTable& operator[](int bits) const noexcept { return widths[bits]; }
};

constexpr KltLevels MakeKltLevels() {
  // Room for keys: their first channels have heavier tails than normal values, and errors of clipped ones weigh most.
  constexpr float kUniformRms[] = {26, 22, 20};
  KltLevels result;
  result.widths[0].rms = 1;
  for (int bits = 1; bits <= kMaxAllocatedTrellis; ++bits) result.widths[bits] = kTrellisLevels[bits - kMinTrellisBits];
  for (int bits = kMaxAllocatedTrellis + 1; bits <= kMaxAllocatedBits; ++bits) {
    result.widths[bits].rms = kUniformRms[bits - kMaxAllocatedTrellis - 1];
    for (int window = 0; window < 256; ++window) {
      const int code = window & ((1 << bits) - 1);
      result.widths[bits].levels[window] = static_cast<int8_t>((2 * code + 1 - (1 << bits)) * UniformStep(bits));
    }
  }
  return result;
}

inline constexpr KltLevels kKltLevels = MakeKltLevels();

}  // namespace kvanta::formats
