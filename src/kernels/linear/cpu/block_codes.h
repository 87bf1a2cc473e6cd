// Codes of blocks, unpacked from a panel (block_layout.h) over the 64 bytes (Bytes) of an ISA unit.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/linear/cpu/block_layout.h"

namespace kvanta::kernels {
namespace {

// Values of the 16 codes, unsigned, four times: look-ups of 64 entries use 6 bits of an index.
struct UnsignedValues {
  alignas(64) uint8_t bytes[64];
};
template <BlockLayout kLayout>
constexpr UnsignedValues MakeUnsignedValues() {
  UnsignedValues values{};
  for (int i = 0; i < 64; ++i) {
    const int8_t value = kLayout.table == CodeTable::kIq4 ? weights::kIq4Values[i % 16] : weights::kE2m1Values[i % 16];
    values.bytes[i] = static_cast<uint8_t>(int{value} + kLayout.code_offset);
  }
  return values;
}
template <BlockLayout kLayout>
constexpr UnsignedValues kUnsignedValues = MakeUnsignedValues<kLayout>();

// Unsigned codes of quad kQuad, k from 4 * kQuad on, of 16 columns; w: the block.
template <class Bytes, BlockLayout kLayout, int kQuad>
KVANTA_INLINE typename Bytes::V UnpackQuad(const uint8_t* w) {
  constexpr int kLow = kLayout.low_bits, kHigh = kLayout.high_bits, kSharing = 8 / kLow;
  typename Bytes::V codes = Bytes::Load(w + kQuad / kSharing * 64);
  if constexpr (kQuad % kSharing != 0) codes = Bytes::Right(codes, kQuad % kSharing * kLow);
  if constexpr (kLow < 8) codes = Bytes::And(codes, (1 << kLow) - 1);
  if constexpr (kHigh != 0) {
    constexpr int kHighSharing = 8 / kHigh, kShift = kQuad % kHighSharing * kHigh - kLow;
    typename Bytes::V high = Bytes::Load(w + kLow * 64 + kQuad / kHighSharing * 64);
    if constexpr (kShift > 0) high = Bytes::Right(high, kShift);
    if constexpr (kShift < 0) high = Bytes::Left(high, -kShift);
    codes = Bytes::Or(codes, Bytes::And(high, ((1 << kHigh) - 1) << kLow));
  }
  if constexpr (kLayout.table != CodeTable::kNone) codes = Bytes::LookUp(codes, kUnsignedValues<kLayout>.bytes);
  return codes;
}

}  // namespace
}  // namespace kvanta::kernels
