// Token bitmasks, one bit per token (kvanta/constraint.h).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <span>

namespace kvanta::runner {

inline int64_t MaskWords(int64_t vocab) noexcept {
  return (vocab + 31) / 32;
}

inline bool Allows(std::span<const uint32_t> mask, int32_t token) noexcept {
  return (mask[static_cast<size_t>(token) / 32] >> (token % 32) & 1U) != 0;
}

// Sets logits of tokens that the mask does not allow to -infinity; returns how many are allowed. Bits beyond the
// vocabulary are ignored. logits: f32 [vocab].
inline int64_t ApplyMask(std::span<const uint32_t> mask, std::span<float> logits) noexcept {
  int64_t allowed = 0;
  for (size_t word = 0; word * 32 < logits.size(); ++word) {
    const auto part = logits.subspan(word * 32, std::min<size_t>(32, logits.size() - word * 32));
    const uint32_t bits = part.size() == 32 ? mask[word] : mask[word] & ((1U << part.size()) - 1U);
    allowed += std::popcount(bits);
    if (bits == 0) {
      std::fill(part.begin(), part.end(), -INFINITY);
    } else if (bits != ~0U) {
      for (size_t i = 0; i < part.size(); ++i) {
        if ((bits >> i & 1U) == 0) part[i] = -INFINITY;
      }
    }
  }
  return allowed;
}

}  // namespace kvanta::runner
