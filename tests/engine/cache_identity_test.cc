// Stored pages are found by later builds: their bytes may only change together with the numerics version.
#include "engine/cache_identity.h"

#include <gtest/gtest.h>

#include "engine/requests.h"
#include "store/page_key.h"

namespace kvanta::engine {
namespace {

// SHA-256 over the pages of a random prompt. If these change, raise kNumericsVersion and record them anew.
struct GoldenPages {
  const char* format;
  const char* digest;
};
constexpr int kRecordedVersion = 1;
constexpr GoldenPages kGolden[] = {
    {"fp32", "2c4a95629c66de2a86da3da512e2c5d1b1fed80beaf7dc5d0973a49bc9415704"},
    {"int4", "2f051a3383a018e83574c5dc1f896596b9b374242b7bb563c100a74ee8ecc0ca"},
    {"k=int8,v=fp8_e4m3", "99d102136ac4175b4196d3aaf07b885791ae1bc15d3f59295c59f02c19a83cda"},
};

TEST(CacheIdentity, PageBytesAreThoseOfTheNumericsVersion) {
#ifndef __x86_64__
  GTEST_SKIP() << "recorded on x86-64, whose C library rounds some functions otherwise";
#endif
  EXPECT_EQ(kNumericsVersion, kRecordedVersion);
  std::mt19937_64 random(1);
  const auto tokens = RandomTokens(random, 80);
  for (const GoldenPages& golden : kGolden) {
    EngineConfig config = TinyConfig(Model(), golden.format);
    config.isa = "portable";
    Engine engine(config);
    std::vector<float> logits(tokens.size() * 96);
    engine.Logits(tokens, 0, logits, true);
    std::string bytes;
    for (int page = 0; page < 5; ++page) {
      const auto file = engine.ExportPage(tokens, page);
      bytes.append(file.begin(), file.end());
    }
    EXPECT_EQ(store::Hex(store::IdentityKey(bytes)), golden.digest) << golden.format;
  }
}

TEST(CacheIdentity, NamesAllThatPagesDependOn) {
  const models::TempFolder folder;
  EngineConfig config = TinyConfig(Model(), "int4");
  config.kv_cache_dir = folder.Path();
  const std::string base = CacheIdentity(LoadComponents(config));
  EXPECT_EQ(base, CacheIdentity(LoadComponents(config)));
  std::vector<EngineConfig> others(5, config);
  others[0].kv_cache_dtype = "int8";
  others[1].page_size = 32;
  others[2].isa = "portable";
  others[3].weight_dtype = "int8";
  others[4].dtype = "bfloat16";
  for (size_t i = 0; i < others.size(); ++i) EXPECT_NE(CacheIdentity(LoadComponents(others[i])), base) << i;
  const TinyModel other_theta({.extra = ", \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2.0}"});
  config.model = other_theta.Path();  // the same weights
  EXPECT_NE(CacheIdentity(LoadComponents(config)), base);
}

}  // namespace
}  // namespace kvanta::engine
