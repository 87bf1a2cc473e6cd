// Codes to operands of tensor cores, in registers: the values of the formats, where the kernels look for them. The
// source is the GPU's, its instructions are emulated.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "emulated/cuda_primitives.h"
// Primitives first.
#include "formats/bit_planes.h"
#include "kernels/cuda/codes.h"

namespace kvanta::kernels::cuda {
namespace {

// Values of the channels in a row's bytes.
template <Code kCode>
std::vector<float> Decode(const std::vector<uint8_t>& row, int channels) {
  std::vector<float> values(static_cast<size_t>(channels));
  for (int c = 0; c < channels; ++c) {
    const auto at = static_cast<size_t>(c);
    if constexpr (kCode == Code::kE4M3) values[at] = formats::E4m3::Decode(row[at]);
    if constexpr (kCode == Code::kE5M2) values[at] = formats::E5m2::Decode(row[at]);
    if constexpr (kCode == Code::kInt8) values[at] = static_cast<float>(static_cast<int8_t>(row[at]));
  }
  if constexpr (formats::CodeBits(kCode) == 4) formats::DecodeLevels<kCode>(row.data(), channels, values.data());
  return values;
}

bool Same(float found, float expected) {
  return found == expected || (std::isnan(found) && std::isnan(expected));
}

float Half(uint32_t pair, int half) {
  return Fp16ToFloat(static_cast<uint16_t>(pair >> static_cast<unsigned>(16 * half)));
}

template <class T>
class GpuCodesTest : public ::testing::Test {};
template <Code kCode>
using Constant = std::integral_constant<Code, kCode>;
using Codes = ::testing::Types<Constant<Code::kE4M3>, Constant<Code::kE5M2>, Constant<Code::kInt8>,
                               Constant<Code::kInt4>, Constant<Code::kUint4>, Constant<Code::kE2M1>>;
TYPED_TEST_SUITE(GpuCodesTest, Codes);

std::vector<uint8_t> Bytes(std::mt19937& random, size_t count) {
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

TYPED_TEST(GpuCodesTest, KeysOfAUnit) {
  constexpr Code kCode = TypeParam::value;
  using Operand = CodeOperand<kCode>;
  std::mt19937 random(1);
  for (int i = 0; i < 4096; ++i) {
    std::vector<uint8_t> bytes = Bytes(random, 4);
    bytes[static_cast<size_t>(i / 256 % 4)] = static_cast<uint8_t>(i);  // every byte at every place
    const std::vector<float> values = Decode<kCode>(bytes, Operand::kPanelChannels);
    uint32_t unit = 0;
    std::memcpy(&unit, bytes.data(), 4);
    const auto check = [&](auto pair) {
      constexpr int kPair = decltype(pair)::value;
      if constexpr (kPair < Operand::kRegisters) {
        const uint32_t found = Operand::template KeyPair<kPair>(unit);
        for (int half = 0; half < 2; ++half) {
          const float expected = values[static_cast<size_t>(Operand::KeyChannel(kPair, half))];
          ASSERT_TRUE(Same(Half(found, half) * Operand::kUnit, expected)) << std::hex << unit << " pair " << kPair;
        }
      }
    };
    check(std::integral_constant<int, 0>{});
    check(std::integral_constant<int, 1>{});
    check(std::integral_constant<int, 2>{});
    check(std::integral_constant<int, 3>{});
  }
}

TYPED_TEST(GpuCodesTest, ValuesOfEightTokens) {
  constexpr Code kCode = TypeParam::value;
  using Operand = CodeOperand<kCode>;
  std::mt19937 random(2);
  for (int round = 0; round < 1024; ++round) {
    const std::vector<uint8_t> bytes = Bytes(random, sizeof(typename Operand::Loaded));
    typename Operand::Loaded loaded;
    std::memcpy(&loaded, bytes.data(), bytes.size());
    const auto check = [&](auto index) {
      constexpr int kChannel = decltype(index)::value;
      uint32_t pairs[4];
      Operand::template ValuePairs<kChannel>(loaded, pairs);
      for (int token = 0; token < 8; ++token) {
        const uint32_t word = loaded.word[token / 4][kChannel * Operand::kBits / 8];
        const auto element = static_cast<uint8_t>(word >> static_cast<unsigned>(8 * (token % 4)));
        // Below 8 bits an element has two channels.
        const std::vector<float> values = Decode<kCode>({element, 0, 0, 0}, 8 / Operand::kBits * 4);
        const float expected = values[Operand::kBits == 8 ? 0 : kChannel % 2];
        ASSERT_TRUE(Same(Half(pairs[token % 4], token / 4) * Operand::kUnit, expected)) << token << " " << kChannel;
      }
    };
    check(std::integral_constant<int, 0>{});
    check(std::integral_constant<int, 1>{});
    check(std::integral_constant<int, 2>{});
    check(std::integral_constant<int, 3>{});
  }
}

TEST(GpuCodesTest, WholeHalvesKeepTheirBits) {
  using Operand = CodeOperand<Code::kBf16>;
  EXPECT_EQ(Operand::KeyPair<0>(0x12345678U), 0x12345678U);
  Operand::Loaded loaded;
  for (uint32_t pair = 0; pair < 4; ++pair) {
    for (uint32_t channel = 0; channel < 4; ++channel) {
      loaded.word[pair][channel] = (2 * pair + channel * 16) | ((2 * pair + 1 + channel * 16) << 16U);
    }
  }
  uint32_t pairs[4];
  Operand::ValuePairs<3>(loaded, pairs);
  for (uint32_t j = 0; j < 4; ++j) EXPECT_EQ(pairs[j], (j + 48) | ((j + 52) << 16U));
}

// GPUs before sm_89 have no instruction for it.
TEST(GpuCodesTest, E4m3InSteps) {
  for (uint32_t bytes = 0; bytes < 0x10000; ++bytes) {
    const uint32_t found = E4m3ToF16InSteps(bytes);
    for (int half = 0; half < 2; ++half) {
      ASSERT_TRUE(Same(Half(found, half), Half(E4m3ToF16(bytes), half))) << std::hex << bytes;
    }
  }
}

}  // namespace
}  // namespace kvanta::kernels::cuda
