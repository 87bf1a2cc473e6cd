#include "formats/klt_group.h"

#include <algorithm>
#include <array>
#include <span>

#include "formats/bit_planes.h"
#include "formats/bytes.h"
#include "formats/klt_levels.h"
#include "formats/rounding.h"
#include "formats/trellis_row.h"

namespace kvanta::formats {
namespace {

// Values of a level of 1, by bits and step.
using Scales = std::array<std::array<float, kDeviationSteps>, kMaxAllocatedBits + 1>;
constexpr Scales MakeScales() {
  Scales scales{};
  for (size_t bits = 0; bits < scales.size(); ++bits) {
    for (size_t step = 0; step < kDeviationSteps; ++step) {
      scales[bits][step] = ScaleOfLevel(static_cast<int>(step), kKltLevels[static_cast<int>(bits)].rms);
    }
  }
  return scales;
}
constexpr Scales kScales = MakeScales();

int Nibble(const uint8_t* section, int index) noexcept {
  return section[index / 2] >> 4 * (index % 2) & 15;
}
void AddNibble(uint8_t* section, int index, int value) noexcept {
  section[index / 2] = static_cast<uint8_t>(section[index / 2] | value << 4 * (index % 2));
}

}  // namespace

void GroupChannels::Read(const uint8_t* section, int head_dim, int mean_bits) noexcept {
  const int count = head_dim / kAllocationBlock;
  const uint8_t* const bits_of = section + head_dim / 2;
  int blocks_of[16] = {};  // blocks by their bits
  int sum = 0;
  for (int block = 0; block < count; ++block) {
    const int bits = Nibble(bits_of, block);
    ++blocks_of[bits];
    sum += bits;
  }
  bool valid = sum == mean_bits * count;
  int first[kMaxAllocatedBits + 1];  // place of the first block with these bits, after those with more
  int places = 0;
  for (int bits = kMaxAllocatedBits; bits >= 0; --bits) {
    first[bits] = places;
    places += blocks_of[bits];
  }
  valid = valid && places == count;
  blocks.head_dim = head_dim;
  for (int block = 0; block < count; ++block) {
    const int bits = valid ? Nibble(bits_of, block) : 0;
    const int at = valid ? first[bits]++ : block;
    blocks.bits[at] = static_cast<uint8_t>(bits);
    place[at] = static_cast<uint8_t>(block);
    const auto& scales = kScales[static_cast<size_t>(bits)];
    const uint8_t* const steps = section + block * (kAllocationBlock / 2);
    float* const to = scale + at * kAllocationBlock;
    for (int byte = 0; byte < kAllocationBlock / 2; ++byte) {
      to[2 * byte] = scales[steps[byte] & 15U];
      to[2 * byte + 1] = scales[steps[byte] >> 4U];
    }
  }
  blocks.Count();
}

void EncodeKltGroup(int mean_bits, const float* x, int head_dim, HeadParameters head, GroupSections out,
                    EncodeCounts& counts, KltSearch search) noexcept {
  const BitAllocation calibrated =
      head.allocation != nullptr ? *head.allocation : DefaultAllocation(head_dim, mean_bits);
  const auto channels = static_cast<size_t>(head_dim);
  std::array<int, kMaxHeadDim> steps{};
  std::array<float, kMaxHeadDim> deviations{};  // of errors, as the tokens' channels have them
  for (int c = 0; c < head_dim; ++c) {
    double square = 0;
    for (int token = 0; token < kKltGroup; ++token) {
      const double value = ClampOrZero(x[token * head_dim + c], kMaxTrellisValue);
      square += value * value;
    }
    const auto at = static_cast<size_t>(c);
    steps[at] = DeviationStep(square / kKltGroup);
    deviations[at] = static_cast<float>(double{calibrated.deviation[c]} * GroupDeviation(steps[at]));
  }
  std::array<uint8_t, kMaxHeadDim / kAllocationBlock> bits{};
  SpendBits(std::span(deviations).first(channels), mean_bits, bits.data());

  uint8_t* const section = out.channel_scales;
  std::fill_n(section, GroupScaleBytes({.token_group = kKltGroup, .channel_bits = true}, head_dim), uint8_t{0});
  for (int c = 0; c < head_dim; ++c) AddNibble(section, c, steps[static_cast<size_t>(c)]);
  for (int block = 0; block < head_dim / kAllocationBlock; ++block) {
    AddNibble(section + head_dim / 2, block, bits[static_cast<size_t>(block)]);
  }
  GroupChannels group;
  group.Read(section, head_dim, mean_bits);
  BitAllocation allocation;
  static_cast<BlockBits&>(allocation) = group.blocks;
  std::array<float, kMaxHeadDim> sorted{};
  std::array<float, kMaxHeadDim> levels_of{};  // levels of a value of 1
  for (int code = 0; code < head_dim; ++code) {
    sorted[static_cast<size_t>(code)] = deviations[static_cast<size_t>(group.Channel(code))];
    levels_of[static_cast<size_t>(code)] = 1 / group.scale[code];
  }
  allocation.SetWeights(std::span(sorted).first(channels));
  const int row_bytes = head_dim * mean_bits / 8;
  for (int token = 0; token < kKltGroup; ++token) {
    float row[kLongestRow];
    for (int code = 0; code < head_dim; ++code) {
      row[code] = x[token * head_dim + group.Channel(code)] * levels_of[static_cast<size_t>(code)];
    }
    EncodeKltRow(allocation, row,
                 {.codes = out.codes + token * row_bytes, .token_scales = out.token_scales + 2 * token}, counts,
                 search);
  }
}

void DecodeKltGroup(int mean_bits, ConstGroupSections in, int head_dim, float* x) noexcept {
  GroupChannels group;
  group.Read(in.channel_scales, head_dim, mean_bits);
  for (int token = 0; token < kKltGroup; ++token) {
    int8_t levels[kLongestRow];
    KltLevelsOf(group.blocks, in.codes + token * (head_dim * mean_bits / 8), levels);
    const float scale = Fp16ToFloat(LoadBytes<uint16_t>(in.token_scales + 2 * token));
    for (int code = 0; code < head_dim; ++code) {
      x[token * head_dim + group.Channel(code)] = static_cast<float>(levels[code]) * scale * group.scale[code];
    }
  }
}

}  // namespace kvanta::formats
