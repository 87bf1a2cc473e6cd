#include "formats/klt.h"

#include <algorithm>
#include <cmath>

#include "formats/bit_planes.h"
#include "formats/bytes.h"
#include "formats/klt_levels.h"
#include "formats/klt_search.h"
#include "formats/rounding.h"
#include "formats/row_sum.h"
#include "formats/trellis_row.h"

namespace kvanta::formats {
namespace {

struct PortableKltSteps {
  template <int kBits>
  static void Run(const int16_t* targets, const int16_t* gains, int16_t* metrics, int16_t* decisions) noexcept {
    constexpr int kTargets = kTrellisStates >> kBits;
    const int8_t* levels = kKltLevels[kBits].levels;
    for (int element = kAllocationBlock - 1; element >= 0; --element) {
      int16_t* decision = decisions + element * kKltDecisions;
      int16_t best[kTargets];
      std::copy_n(metrics, kTargets, best);
      std::fill_n(decision, kTargets, int16_t{0});
      for (int x = 1; x < 1 << kBits; ++x) {
        for (int u = 0; u < kTargets; ++u) {
          const int16_t metric = metrics[x << (8 - kBits) | u];
          decision[u] = metric < best[u] ? static_cast<int16_t>(x) : decision[u];
          best[u] = std::min(best[u], metric);
        }
      }
      const int32_t target = targets[element], gain = gains[element];
      for (int w = 0; w < kTrellisStates; ++w) {
        const int32_t error = SaturateInt16(8 * (((target - kKltUnit * levels[w]) * gain + (1 << 14)) >> 15));
        metrics[w] = static_cast<int16_t>(SaturateInt16(best[w >> kBits] + ((error * error) >> 16)));
      }
    }
    const int32_t minimum = *std::min_element(metrics, metrics + kTrellisStates);
    for (int w = 0; w < kTrellisStates; ++w) metrics[w] = static_cast<int16_t>(SaturateInt16(metrics[w] - minimum));
  }
};

void PackCodes(const BitAllocation& allocation, const uint8_t* codes, uint8_t* out) noexcept {
  for (int block = 0; block < allocation.coded_blocks; ++block) {
    const int bits = allocation.bits[block];
    PackOctet(bits, codes + block * kAllocationBlock, out);
    out += bits;
  }
}

int64_t RowBytes(const BitAllocation& allocation) noexcept {
  int64_t bytes = 0;
  for (int block = 0; block < allocation.coded_blocks; ++block) bytes += allocation.bits[block];
  return bytes;
}

}  // namespace

void PortableKltSearch(const BitAllocation& allocation, const int16_t* targets, uint8_t* codes) noexcept {
  SearchKlt<PortableKltSteps>(allocation, targets, codes);
}

void KltLevelsOf(const BlockBits& allocation, const uint8_t* codes, int8_t* levels) noexcept {
  const uint8_t* string_begin = codes;
  for (int block = 0; block < allocation.scalar_blocks; ++block) string_begin += allocation.bits[block];
  for (int block = 0; block < allocation.head_dim / kAllocationBlock; ++block, levels += kAllocationBlock) {
    const int bits = allocation.bits[block];
    uint8_t next = 0;
    if (bits <= kMaxAllocatedTrellis && bits != 0) {  // the window of the last codes goes on
      next = block + 1 < allocation.coded_blocks ? codes[bits] : *string_begin;
    }
    OctetLevels(bits, codes, next, kKltLevels[bits].levels, levels);
    codes += bits;
  }
}

void EncodeKltRow(const BitAllocation& allocation, const float* x, RowSections out, EncodeCounts& counts,
                  KltSearch search) noexcept {
  const int64_t saturated_before = counts.saturated;
  const int head_dim = allocation.head_dim;
  CountRow(x, head_dim, kMaxTrellisValue, counts);
  float values[kLongestRow];
  for (int i = 0; i < head_dim; ++i) values[i] = ClampOrZero(x[i], kMaxTrellisValue);
  const int coded = allocation.coded_blocks * kAllocationBlock;
  const double square = SumOf(coded, [&](int i) {
    const double value = double{values[i]} / double{AllocatedRms(allocation.bits[i / kAllocationBlock])};
    return value * value;
  });
  const double step = std::sqrt(square / coded);  // values per level
  uint16_t scale = 0;
  if (step >= kMinTrellisStep) {
    const auto factor = static_cast<float>(double{kKltUnit} / step);
    int16_t targets[kLongestRow];
    for (int i = 0; i < coded; ++i) {
      const float target = std::max(float{-kMaxKltTarget}, std::min(float{kMaxKltTarget}, values[i] * factor));
      targets[i] = static_cast<int16_t>(RoundToInt(target));
    }
    uint8_t codes[kLongestRow];
    for (int i = 0; i < allocation.scalar_blocks * kAllocationBlock; ++i) {
      const int bits = allocation.bits[i / kAllocationBlock];
      codes[i] = ScalarCode(bits, kKltLevels[bits].levels, kKltUnit, targets[i]);
    }
    if (allocation.scalar_blocks < allocation.coded_blocks) search(allocation, targets, codes);
    PackCodes(allocation, codes, out.codes);
    int8_t levels[kLongestRow];
    KltLevelsOf(allocation, out.codes, levels);
    const auto weighted = [&](int i) { return double{allocation.weight[i]} * static_cast<double>(levels[i]); };
    const double product = SumOf(head_dim, [&](int i) { return weighted(i) * double{values[i]}; });
    const double energy = SumOf(head_dim, [&](int i) { return weighted(i) * static_cast<double>(levels[i]); });
    bool saturated = false;
    scale = RoundScale(static_cast<float>(energy > 0 ? product / energy : 0.0), saturated);
    if (saturated && counts.saturated == saturated_before) ++counts.saturated;
  }
  if (scale == 0) std::fill_n(out.codes, RowBytes(allocation), uint8_t{0});
  StoreBytes(out.token_scales, scale);
}

void DecodeKltRow(const BitAllocation& allocation, ConstRowSections in, float* x) noexcept {
  int8_t levels[kLongestRow];
  KltLevelsOf(allocation, in.codes, levels);
  const float scale = Fp16ToFloat(LoadBytes<uint16_t>(in.token_scales));
  for (int i = 0; i < allocation.head_dim; ++i) x[i] = static_cast<float>(levels[i]) * scale;
}

}  // namespace kvanta::formats
