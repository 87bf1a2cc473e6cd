// Levels of a trellis code as 16-bit operands of its search (formats/trellis_search.h).
#pragma once

#include <cstdint>

#include "formats/trellis_levels.h"

namespace kvanta::kernels {
namespace {

struct TrellisTables {
  alignas(64) int16_t level[256];   // times 256: the high half of its product with a target, rounded, is a 128th
  alignas(64) int16_t square[256];  // half the square, rounded up
};

constexpr TrellisTables MakeTrellisTables(int bits) {
  TrellisTables tables{};
  for (int w = 0; w < 256; ++w) {
    // NOLINTNEXTLINE(bugprone-signed-char-misuse): a level is a number
    const int level = formats::kTrellisLevels[bits - formats::kMinTrellisBits].levels[w];
    tables.level[w] = static_cast<int16_t>(level * 256);
    tables.square[w] = static_cast<int16_t>((level * level + 1) >> 1);
  }
  return tables;
}
template <int kBits>
constexpr TrellisTables kTrellisTables = MakeTrellisTables(kBits);

}  // namespace
}  // namespace kvanta::kernels
