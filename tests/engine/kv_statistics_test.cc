// Statistics of keys and values, compared with the keys of exported pages.
#include "observe/kv_statistics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "engine/exported_page.h"
#include "engine/requests.h"

namespace kvanta::engine {
namespace {

using observe::kBinsPerOctave;
using observe::kLowestExponent;
using observe::kMagnitudeBins;
using observe::MagnitudeBin;
using observe::MagnitudeEdge;

TEST(MagnitudeBins, EdgesBoundTheirBins) {
  for (int bin = 0; bin < kMagnitudeBins; ++bin) {
    const float low = MagnitudeEdge(bin), high = MagnitudeEdge(bin + 1);
    ASSERT_LT(low, high);
    ASSERT_EQ(MagnitudeBin(low), bin);
    ASSERT_EQ(MagnitudeBin(std::nextafter(high, 0.0F)), bin);
  }
  EXPECT_EQ(MagnitudeEdge(-kLowestExponent * kBinsPerOctave), 1.0F);
  EXPECT_EQ(MagnitudeBin(0.0F), 0);
  EXPECT_EQ(MagnitudeBin(1e-45F), 0);
  EXPECT_EQ(MagnitudeBin(3e38F), kMagnitudeBins - 1);
}

// K [token][channel] of one head, from the pages of an unquantized f32 cache.
std::vector<float> KeysOfPages(Engine& engine, std::span<const int32_t> tokens, int layer, int head) {
  std::vector<float> logits(tokens.size() * 96);
  engine.Logits(tokens, 0, logits, true);
  std::vector<float> keys;
  for (size_t index = 0; index * 16 < tokens.size(); ++index) {
    const ExportedPage exported = Export(engine, tokens, static_cast<int>(index));
    std::vector<float> cell(size_t{16} * 32);
    const int64_t at = exported.header.layout.layers[static_cast<size_t>(layer)].KCell(head);
    std::memcpy(cell.data(), exported.Canonical().data() + at, cell.size() * sizeof(float));
    keys.insert(keys.end(), cell.begin(), cell.end());
  }
  return keys;
}

TEST(KvStatistics, MatchTheCachedKeys) {
  Engine engine(TinyConfig(Model(), "fp32"));
  std::mt19937_64 random(5);
  const auto tokens = RandomTokens(random, 64);
  const KvStatistics found = engine.CollectStatistics(tokens);
  EXPECT_EQ(found.tokens, 64);
  constexpr int kLayer = 0;  // the next one attends to keys that the collecting pass has rounded to bf16
  for (int head = 0; head < 2; ++head) {
    const std::vector<float> keys = KeysOfPages(engine, tokens, kLayer, head);
    std::vector<int64_t> histogram(kMagnitudeBins);
    for (const float key : keys) ++histogram[static_cast<size_t>(MagnitudeBin(std::abs(key)))];
    const int64_t index = int64_t{kLayer} * 4 + head;
    EXPECT_TRUE(std::equal(histogram.begin(), histogram.end(), found.histogram.begin() + index * kMagnitudeBins));
    for (int c = 0; c < 32; ++c) {
      float amax = 0;
      double sum = 0, square_sum = 0;
      for (size_t token = 0; token < 64; ++token) {
        const float key = keys[token * 32 + static_cast<size_t>(c)];
        amax = std::max(amax, std::abs(key));
        sum += key;
        square_sum += double{key} * key;
      }
      const auto at = static_cast<size_t>(index * 32 + c);
      ASSERT_EQ(found.amax[at], amax);
      ASSERT_EQ(found.sum[at], sum);
      ASSERT_EQ(found.square_sum[at], square_sum);
    }
  }
}

TEST(KvStatistics, CountsEveryValueOnce) {
  Engine engine(TinyConfig(Model(), "int4"));
  std::mt19937_64 random(6);
  const auto tokens = RandomTokens(random, 101);
  const KvStatistics found = engine.CollectStatistics(tokens);
  const auto heads = static_cast<int64_t>(found.histogram.size()) / kMagnitudeBins;
  EXPECT_EQ(heads, 2 * 2 * 2);
  for (int64_t head = 0; head < heads; ++head) {
    const auto first = found.histogram.begin() + head * kMagnitudeBins;
    EXPECT_EQ(std::accumulate(first, first + kMagnitudeBins, int64_t{0}), 101 * 32);
  }
  EXPECT_EQ(engine.Stats().cache_used_bytes, 0) << "nothing is kept";
}

TEST(KvStatistics, MeansAreSubtractedFromKeysOnly) {
  Engine engine(TinyConfig(Model(), "bf16"));
  std::mt19937_64 random(7);
  const auto tokens = RandomTokens(random, 48);
  const KvStatistics plain = engine.CollectStatistics(tokens);
  std::vector<float> means;
  for (size_t layer = 0; layer < 2; ++layer) {
    for (size_t c = 0; c < 64; ++c) means.push_back(static_cast<float>(plain.sum[layer * 128 + c] / 48));
  }
  const KvStatistics centred = engine.CollectStatistics(tokens, means);
  for (size_t layer = 0; layer < 2; ++layer) {
    for (size_t c = 0; c < 64; ++c) {
      EXPECT_NEAR(centred.sum[layer * 128 + c], 0, 1e-4);
      EXPECT_LT(centred.square_sum[layer * 128 + c], plain.square_sum[layer * 128 + c] + 1e-4);
      EXPECT_EQ(centred.sum[layer * 128 + 64 + c], plain.sum[layer * 128 + 64 + c]) << "V";
    }
  }
}

TEST(KvStatistics, RefusesInvalidInput) {
  Engine engine(TinyConfig(Model(), "bf16"));
  std::mt19937_64 random(8);
  EXPECT_THROW(engine.CollectStatistics({}), InputError);
  EXPECT_THROW(engine.CollectStatistics(RandomTokens(random, 129)), InputError) << "max_model_len is 128";
  const std::vector<float> few(3);
  EXPECT_THROW(engine.CollectStatistics(RandomTokens(random, 4), few), InputError);
  TinyShape shape;
  shape.key_gain = 1e38F;
  const TinyModel overflowing(shape);
  Engine other(TinyConfig(overflowing, "bf16"));
  EXPECT_THROW(other.CollectStatistics(RandomTokens(random, 4)), InputError);
}

TEST(KvStatistics, RefusesLatents) {
  Engine engine(TinyConfig(LatentModel(), "mla_fp8"));
  try {
    engine.CollectStatistics(std::vector<int32_t>{1, 2, 3});
    ADD_FAILURE() << "accepted";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("stores latents (MLA), whose formats have no scales to calibrate"));
  }
}

}  // namespace
}  // namespace kvanta::engine
