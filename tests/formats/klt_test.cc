// Keys with uneven bits: how bits are spent, what codes mean, what the search finds, and rows at the edges. The bytes
// themselves are compared with an oracle: golden_test.cc.
#include "formats/klt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "error_of.h"
#include "formats/klt_levels.h"
#include "formats/query_transform.h"

namespace kvanta::formats {
namespace {

using testing::HasSubstr;

std::vector<float> Falling(int head_dim, double octaves) {
  std::vector<float> deviations;
  for (int i = 0; i < head_dim; ++i) deviations.push_back(static_cast<float>(std::exp2(-octaves * i / head_dim)));
  return deviations;
}

int BitsOf(const BitAllocation& allocation) {
  int bits = 0;
  for (int block = 0; block < allocation.head_dim / kAllocationBlock; ++block) bits += allocation.bits[block];
  return bits;
}

TEST(BitAllocation, SpendsAllBitsWhereErrorsWeighMost) {
  for (const int head_dim : {16, 32, 64, 128, 256}) {
    for (const int mean_bits : {2, 3}) {
      for (const double octaves : {0.0, 2.0, 5.0, 12.0, 40.0}) {
        const BitAllocation allocation = AllocateBits(Falling(head_dim, octaves), mean_bits);
        const int blocks = head_dim / kAllocationBlock;
        EXPECT_EQ(BitsOf(allocation), mean_bits * blocks);
        for (int block = 1; block < blocks; ++block) EXPECT_LE(allocation.bits[block], allocation.bits[block - 1]);
        if (octaves == 0) {
          EXPECT_EQ(allocation.bits[0], allocation.bits[blocks - 1]);
        }
        if (octaves == 12 && head_dim >= 64) {
          EXPECT_EQ(allocation.bits[0], kMaxAllocatedBits);
          EXPECT_EQ(allocation.bits[blocks - 1], 0);
        }
      }
    }
  }
}

struct Encoded {
  std::vector<uint8_t> codes;
  uint16_t scale = 0;
  EncodeCounts counts;
  std::vector<float> decoded;
};

Encoded EncodeOf(const BitAllocation& allocation, const std::vector<float>& x) {
  Encoded row{.codes = std::vector<uint8_t>(static_cast<size_t>(BitsOf(allocation))), .counts = {}, .decoded = x};
  auto* scale = reinterpret_cast<uint8_t*>(&row.scale);
  EncodeKltRow(allocation, x.data(), {.codes = row.codes.data(), .token_scales = scale}, row.counts, PortableKltSearch);
  DecodeKltRow(allocation, {.codes = row.codes.data(), .token_scales = scale}, row.decoded.data());
  return row;
}

// Levels, bit by bit as klt.h defines them.
TEST(Klt, LevelsAreThoseOfTheWindows) {
  std::mt19937 random(3);
  for (const double octaves : {0.0, 3.0, 9.0}) {
    const BitAllocation allocation = AllocateBits(Falling(128, octaves), 3);
    std::vector<uint8_t> codes(static_cast<size_t>(BitsOf(allocation)));
    for (uint8_t& byte : codes) byte = static_cast<uint8_t>(random());
    int8_t levels[128];
    KltLevelsOf(allocation, codes.data(), levels);
    int string = 0, place = 0;
    for (int block = 0; block < allocation.scalar_blocks; ++block) string += 8 * allocation.bits[block];
    const int end = 8 * static_cast<int>(codes.size());
    for (int i = 0; i < 128; ++i) {
      const int bits = allocation.bits[i / kAllocationBlock];
      int window = 0;
      for (int bit = 0; bit < (bits > kMaxAllocatedTrellis ? bits : 8) && bits != 0; ++bit) {
        int at = place + bit;
        if (at >= end) at = string + (at - end);
        window |= (codes[static_cast<size_t>(at / 8)] >> at % 8 & 1) << bit;
      }
      ASSERT_EQ(levels[i], kKltLevels[bits].levels[window]) << i;
      place += bits;
    }
  }
}

// Weighted errors of normal rows are those for which bits are spent, or less: the search sees weights, and its windows
// span channels of different widths.
TEST(Klt, ErrorsAreThoseThatBitsAreSpentFor) {
  constexpr double kErrors[] = {1, .363, .119, .0384, .0125, .0043, .00135, .0005};
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  for (const int mean_bits : {2, 3}) {
    for (const double octaves : {1.0, 3.0, 6.0}) {
      const std::vector<float> deviations = Falling(64, octaves);
      const BitAllocation allocation = AllocateBits(deviations, mean_bits);
      double expected = 0, found = 0;
      for (int row = 0; row < 300; ++row) {
        std::vector<float> x(64);
        for (size_t i = 0; i < 64; ++i) x[i] = normal(random) * AllocatedRms(allocation.bits[i / kAllocationBlock]);
        const Encoded encoded = EncodeOf(allocation, x);
        for (size_t i = 0; i < 64; ++i) {
          const int bits = allocation.bits[i / kAllocationBlock];
          const double error = double{encoded.decoded[i] - x[i]} / double{AllocatedRms(bits)} * double{deviations[i]};
          found += error * error;
          expected += double{deviations[i] * deviations[i]} * kErrors[bits];
        }
      }
      EXPECT_LT(found, 0.9 * expected) << mean_bits << " bits, " << octaves << " octaves";
      EXPECT_GT(found, 0.4 * expected) << mean_bits << " bits, " << octaves << " octaves";
    }
  }
}

TEST(Klt, RowsAtTheEdges) {
  const BitAllocation allocation = AllocateBits(Falling(32, 4), 2);
  const Encoded zero = EncodeOf(allocation, std::vector<float>(32, 0.0F));
  EXPECT_THAT(zero.codes, testing::Each(0));
  EXPECT_EQ(zero.scale, 0);
  std::vector<float> wild(32, 1.0F);
  wild[3] = std::numeric_limits<float>::quiet_NaN();
  wild[4] = std::numeric_limits<float>::infinity();
  wild[5] = -1e30F;
  const Encoded encoded = EncodeOf(allocation, wild);
  EXPECT_EQ(encoded.counts.nan, 1);
  EXPECT_EQ(encoded.counts.saturated, 2);
  for (const float x : encoded.decoded) EXPECT_TRUE(std::isfinite(x));
}

TEST(KltTransform, PaddingHasNoShareInTheBits) {
  EigenChannels channels{.matrices = std::vector<float>(40 * 40, 0.0F), .deviations = Falling(40, 3)};
  for (size_t i = 0; i < 40; ++i) channels.matrices[41 * i] = 1;
  for (const auto& [mean_bits, padded] : {std::pair{3, 64}, {2, 48}}) {
    const auto transform = MakeKltTransform(channels, 1, 40, mean_bits);
    EXPECT_EQ(transform->head_dim(), 40);
    const BitAllocation& allocation = *transform->Allocation(0);
    EXPECT_EQ(allocation.head_dim, padded);
    EXPECT_EQ(allocation.coded_blocks, 5);
    EXPECT_EQ(BitsOf(allocation), mean_bits * padded / kAllocationBlock) << "those of the padded row's bytes";
    std::vector<float> x(static_cast<size_t>(padded), 0.0F);
    for (size_t i = 0; i < 40; ++i) x[i] = 30 * std::sin(static_cast<float>(i));
    const Encoded encoded = EncodeOf(allocation, x);
    for (size_t i = 40; i < x.size(); ++i) EXPECT_EQ(encoded.decoded[i], 0);
  }
}

TEST(KltTransform, RefusesWhatIsNotACalibration) {
  EigenChannels channels{.matrices = std::vector<float>(256, 0.0F), .deviations = Falling(16, 3)};
  for (size_t i = 0; i < 16; ++i) channels.matrices[17 * i] = 1;
  const auto refusal = [&] { return ErrorOf([&] { MakeKltTransform(channels, 1, 16, 2); }); };
  EXPECT_EQ(refusal(), "no error");
  const auto transform = MakeKltTransform(channels, 1, 16, 2);
  EXPECT_EQ(transform->matrices()[0], AllocatedRms(transform->Allocation(0)->bits[0]));
  EXPECT_NE(transform->Hash(), MakeKltTransform(channels, 1, 16, 3)->Hash());
  const EigenChannels good = channels;
  std::swap(channels.deviations[2], channels.deviations[3]);
  EXPECT_THAT(refusal(), HasSubstr("channel 3 of KV head 0: must be finite, above 0, and not above"));
  channels.deviations = good.deviations;
  channels.deviations[15] = 0;
  EXPECT_THAT(refusal(), HasSubstr("deviation 0 of channel 15"));
  channels.deviations[0] = std::numeric_limits<float>::infinity();
  EXPECT_THAT(refusal(), HasSubstr("deviation inf of channel 0"));
  channels.deviations.pop_back();
  EXPECT_THAT(refusal(), HasSubstr("15 deviations"));
  channels = good;
  channels.matrices[17] = 0;
  EXPECT_THAT(refusal(), HasSubstr("singular"));
  channels.matrices[17] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(refusal(), HasSubstr("not finite"));
}

}  // namespace
}  // namespace kvanta::formats
