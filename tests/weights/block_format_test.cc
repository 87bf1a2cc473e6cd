// Values of weight blocks against the gguf package's.
#include "weights/block_format.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "weights/block_golden.h"

namespace kvanta::weights {
namespace {

std::vector<uint8_t> FromHex(std::string_view hex) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<uint8_t>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
  }
  return bytes;
}

uint64_t Digest(const std::vector<float>& values) {
  uint64_t digest = 0xcbf29ce484222325ULL;
  for (const float value : values) {
    const float positive = value + 0.0F;  // zeros of one sign
    uint8_t bytes[sizeof positive];
    std::memcpy(bytes, &positive, sizeof positive);
    for (const uint8_t byte : bytes) digest = (digest ^ byte) * 0x100000001b3ULL;
  }
  return digest;
}

TEST(BlockFormat, ValuesAreThoseOfTheGgufPackage) {
  int count = 0;
  for (const golden::BlockGolden& golden : golden::kBlocks) {
    const BlockFormat format = FindBlockFormat(golden.format);
    ASSERT_NE(format, BlockFormat::kNone) << golden.format;
    const std::vector<uint8_t> bytes = FromHex(golden.hex);
    ASSERT_EQ(bytes.size() % static_cast<size_t>(BlockBytes(format)), 0U) << golden.format;
    const int64_t in = std::ssize(bytes) / BlockBytes(format) * BlockWeights(format);
    std::vector<float> values(static_cast<size_t>(in));
    DequantizeBlocks(bytes.data(), format, in, values.data());
    EXPECT_EQ(Digest(values), golden.digest) << golden.format;
    ++count;
  }
  EXPECT_EQ(count, kBlockFormats - 1);
}

TEST(BlockFormat, NamesAreUnique) {
  for (int i = 1; i < kBlockFormats; ++i) {
    const auto format = static_cast<BlockFormat>(i);
    EXPECT_EQ(FindBlockFormat(Name(format)), format);
    EXPECT_EQ(RowBytes(format, 3 * BlockWeights(format)), 3 * BlockBytes(format));
  }
  EXPECT_EQ(FindBlockFormat("none"), BlockFormat::kNone);
  EXPECT_EQ(FindBlockFormat("Q9_0"), BlockFormat::kNone);
  EXPECT_EQ(Name(BlockFormat::kNone), "none");
}

}  // namespace
}  // namespace kvanta::weights
