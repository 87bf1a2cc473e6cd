// klt3_g64 and klt2_g64: the codes of formats/klt.h, with bits and scales that follow the channels of each 64 tokens of
// a page instead of those that calibration saw. Keys are in the same eigen-channels, with a variance of 1 there. What
// the tokens of a group share:
//
//   | 4 bits for each channel: its deviation, 2^((n - 8) / 4) | 4 bits for each block of 8 channels: its bits |
//
// of two in a byte the first one low. A row has the blocks in the order of their bits, the most first, of equal ones in
// the order of the channels; its codes are then those of klt.h. x_hat = s * level * deviation / rms, s one for the row,
// rms that of the block's levels. docs/adr/0094.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "formats/klt.h"

namespace kvanta::formats {

inline constexpr int kKltGroup = 64;        // tokens
inline constexpr int kDeviationSteps = 16;  // of 4 bits

// A step's deviation. No machine's library decides the rounding of the roots.
KVANTA_HD constexpr double GroupDeviation(int step) noexcept {
  constexpr double kRoots[4] = {1, 1.189207115002721, 1.4142135623730951, 1.681792830507429};
  return kRoots[step % 4] * static_cast<double>(1U << static_cast<unsigned>(step / 4)) / 4;
}

// The step whose deviation is nearest to the root of a mean square, by ratio.
KVANTA_HD inline int DeviationStep(double mean_square) noexcept {
  constexpr double kHalfStep = 1.189207115002721;  // squared
  int step = 0;
  while (step + 1 < kDeviationSteps && mean_square >= GroupDeviation(step) * GroupDeviation(step) * kHalfStep) ++step;
  return step;
}

// Value of a level of 1, of levels with a root mean square of `rms`.
KVANTA_HD constexpr float ScaleOfLevel(int step, float rms) noexcept {
  const double of_level = 1 / double{rms};
  return static_cast<float>(GroupDeviation(step) * of_level);
}

// Scales and bits of a group's channels, as its section has them.
struct GroupChannels {
  BlockBits blocks;                               // in the order of the row's codes
  uint8_t place[kMaxHeadDim / kAllocationBlock];  // block of channels, by block of codes
  float scale[kMaxHeadDim];                       // value of a level of 1, in the order of the codes

  // Reads a section of head_dim channels. One whose bits are not `mean_bits` on average, which no encoder writes, is of
  // no bits.
  void Read(const uint8_t* section, int head_dim, int mean_bits) noexcept;
  int Channel(int code) const noexcept {
    return place[code / kAllocationBlock] * kAllocationBlock + code % kAllocationBlock;
  }
};

// As Format::encode_token_group and Format::decode_token_group, with `mean_bits` bits on average.
void EncodeKltGroup(int mean_bits, const float* x, int head_dim, HeadParameters head, GroupSections out,
                    EncodeCounts& counts, KltSearch search) noexcept;
void DecodeKltGroup(int mean_bits, ConstGroupSections in, int head_dim, float* x) noexcept;

template <ElementType kKltCode>
struct KltGroup : TrellisTraits<kKltCode> {
  static constexpr Scaling kScaling = {.token = ScaleType::kFp16, .token_group = kKltGroup, .channel_bits = true};
  static constexpr std::string_view kRule =
      "deviation: root mean square of a channel of 64 tokens, in quarters of an octave; bits: where they lower the "
      "error "
      "most; codes and s: as of klt3 and klt2; x_hat = s * level * deviation / rms";

  static void EncodeTokenGroup(const float* x, int head_dim, HeadParameters head, GroupSections out,
                               EncodeCounts& counts) noexcept {
    EncodeKltGroup(CodeBits(kKltCode), x, head_dim, head, out, counts, PortableKltSearch);
  }
  static void DecodeTokenGroup(ConstGroupSections in, int head_dim, float* x) noexcept {
    DecodeKltGroup(CodeBits(kKltCode), in, head_dim, x);
  }
};

struct Klt3Group : KltGroup<ElementType::kKlt3> {
  using Values = Trellis3;
  static constexpr std::string_view kName = "klt3_g64";
  static constexpr std::string_view kSummary =
      "K: as klt3, with scales and bits of the channels of each 64 tokens of a page, with +query; V: t3; open and "
      "first "
      "page exact";
};
struct Klt2Group : KltGroup<ElementType::kKlt2> {
  using Values = Trellis2;
  static constexpr std::string_view kName = "klt2_g64";
  static constexpr std::string_view kSummary =
      "K: as klt2, with scales and bits of the channels of each 64 tokens of a page, with +query; V: t2; open and "
      "first "
      "page exact";
};

}  // namespace kvanta::formats
