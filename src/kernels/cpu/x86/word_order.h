// Shuffles that gather the upper 16 bits of 32 lanes from two registers.
#pragma once

#include <cstdint>

namespace kvanta::kernels {
namespace {

// Positions from which 32 f32 of two registers become bf16.
struct WordOrder {
  alignas(64) uint16_t words[32];
};
// The upper 16 bits of the lanes, in order or, of every four, the first and third before the others (crossed): the
// order in which fp8 decodes to pairs of bf16 (DecodeFp8).
constexpr WordOrder MakeWordOrder(bool crossed) {
  WordOrder order{};
  for (int i = 0; i < 32; ++i) {
    const int lane = crossed ? i / 4 * 4 + i % 2 * 2 + i % 4 / 2 : i;
    order.words[i] = static_cast<uint16_t>(2 * lane + 1);
  }
  return order;
}
constexpr WordOrder kInOrderWords = MakeWordOrder(false);

}  // namespace
}  // namespace kvanta::kernels
