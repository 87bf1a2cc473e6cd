#include "formats/trellis.h"

#include <algorithm>
#include <cmath>

#include "formats/bit_planes.h"
#include "formats/bytes.h"
#include "formats/rounding.h"
#include "formats/row_sum.h"
#include "formats/trellis_levels.h"
#include "formats/trellis_row.h"
#include "formats/trellis_search.h"

namespace kvanta::formats {
namespace {

const TrellisLevelTable& TableOf(int bits) noexcept {
  return kTrellisLevels[bits - kMinTrellisBits];
}

template <int kBits>
struct PortableSteps {
  static constexpr int kTargets = kTrellisStates >> kBits;
  static constexpr int kChoices = 1 << kBits;

  static void Run(const int16_t* targets, int count, int16_t* metrics, int16_t* decisions) noexcept {
    const int8_t* levels = TrellisLevels(kBits);
    int16_t squares[kTrellisStates];
    for (int w = 0; w < kTrellisStates; ++w) squares[w] = static_cast<int16_t>((levels[w] * levels[w] + 1) >> 1);
    for (int step = 1; step <= count; ++step) {
      const int element = count - step;
      const int32_t target = targets[element];
      int16_t costs[kTrellisStates];
      for (int u = 0; u < kTargets; ++u) {
        for (int c = 0; c < kChoices; ++c) {
          const int w = u << kBits | c;
          const int32_t product = (target * levels[w] + 64) >> 7;
          costs[w] = static_cast<int16_t>(SaturateInt16(SaturateInt16(metrics[w >> kBits] - product) + squares[w]));
        }
      }
      // A window's predecessor has metric u = w >> kBits; the costs of w then compete for the next u = w & mask.
      const int32_t square = (target * target + (1 << 14)) >> 15;
      int16_t* decision = decisions + element * kTargets;
      std::copy_n(costs, kTargets, metrics);
      std::fill_n(decision, kTargets, int16_t{0});
      for (int x = 1; x < kChoices; ++x) {
        for (int u = 0; u < kTargets; ++u) {
          const int16_t cost = costs[x << (8 - kBits) | u];
          decision[u] = cost < metrics[u] ? static_cast<int16_t>(x) : decision[u];
          metrics[u] = std::min(metrics[u], cost);
        }
      }
      for (int u = 0; u < kTargets; ++u) metrics[u] = static_cast<int16_t>(SaturateInt16(metrics[u] + square));
      if (step % kReducedSteps != 0) continue;
      const int32_t minimum = *std::min_element(metrics, metrics + kTargets);
      for (int u = 0; u < kTargets; ++u) metrics[u] = static_cast<int16_t>(SaturateInt16(metrics[u] - minimum));
    }
  }
};

// The levels of a row: bits [bits * i, bits * i + 8) of its circular string, i = 0..n - 1.
void LevelsOf(int bits, const uint8_t* codes, int head_dim, int8_t* levels) noexcept {
  const int8_t* table = TrellisLevels(bits);
  const int row_bytes = head_dim * bits / 8;
  for (int octet = 0, byte = 0; octet < head_dim; octet += 8, byte += bits) {
    OctetLevels(bits, codes + byte, codes[byte + bits < row_bytes ? byte + bits : 0], table, levels + octet);
  }
}

void PackCodes(int bits, const uint8_t* codes, int head_dim, uint8_t* out) noexcept {
  for (int octet = 0; octet < head_dim; octet += 8, out += bits) PackOctet(bits, codes + octet, out);
}

}  // namespace

const int8_t* TrellisLevels(int bits) noexcept {
  return TableOf(bits).levels;
}

void PortableTrellisSearch(int bits, const int16_t* targets, int head_dim, uint8_t* codes) noexcept {
  SearchTrellis<PortableSteps>(bits, targets, head_dim, codes);
}

void EncodeTrellisRow(int bits, const float* x, int head_dim, HeadParameters head, RowSections out,
                      EncodeCounts& counts, TrellisSearch search) noexcept {
  const int64_t saturated_before = counts.saturated;
  const int channels = head_dim - head.unused_channels;
  CountRow(x, head_dim, kMaxTrellisValue, counts);
  float values[kLongestRow];
  for (int i = 0; i < head_dim; ++i) values[i] = ClampOrZero(x[i], kMaxTrellisValue);
  const double square = SumOf(head_dim, [&](int i) { return double{values[i]} * double{values[i]}; });
  int32_t largest = 0;
  for (int i = 0; i < head_dim; ++i) largest = std::max(largest, MagnitudeBits(values[i]));
  // Values per level: the root mean square has its place, unless the largest value would pass 255 levels.
  const double step = std::max(std::sqrt(square / channels) / double{TableOf(bits).rms},
                               double{std::bit_cast<float>(largest)} / double{kMaxTrellisTarget / kTrellisUnit});
  uint16_t scale = 0;
  if (step >= kMinTrellisStep) {
    const auto factor = static_cast<float>(double{kTrellisUnit} / step);
    int16_t targets[kLongestRow];
    for (int i = 0; i < head_dim; ++i) {
      const float target = std::max(-kMaxTrellisTarget, std::min(kMaxTrellisTarget, values[i] * factor));
      targets[i] = static_cast<int16_t>(RoundToInt(target));
    }
    uint8_t codes[kLongestRow];
    search(bits, targets, head_dim, codes);
    PackCodes(bits, codes, head_dim, out.codes);
    int8_t levels[kLongestRow];
    LevelsOf(bits, out.codes, head_dim, levels);
    const double product = SumOf(head_dim, [&](int i) { return double{values[i]} * static_cast<double>(levels[i]); });
    int32_t energy = 0;
    for (int i = 0; i < channels; ++i) energy += levels[i] * levels[i];
    bool saturated = false;
    scale = RoundScale(static_cast<float>(product / std::max(1, energy)), saturated);
    if (saturated && counts.saturated == saturated_before) ++counts.saturated;
  }
  if (scale == 0) std::fill_n(out.codes, head_dim * bits / 8, uint8_t{0});
  StoreBytes(out.token_scales, scale);
}

void DecodeTrellisRow(int bits, ConstRowSections in, int head_dim, float* x) noexcept {
  int8_t levels[kLongestRow];
  LevelsOf(bits, in.codes, head_dim, levels);
  const float scale = Fp16ToFloat(LoadBytes<uint16_t>(in.token_scales));
  for (int i = 0; i < head_dim; ++i) x[i] = static_cast<float>(levels[i]) * scale;
}

}  // namespace kvanta::formats
