// Stored pages are found by later builds: their bytes may only change together with the numerics version.
#include "engine/cache_identity.h"

#include <gtest/gtest.h>
#include <signal.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>

#include "engine/exported_page.h"
#include "engine/requests.h"
#include "isa_environment.h"
#include "kernels/ops.h"
#include "store/page_file.h"

namespace kvanta::engine {
namespace {

// SHA-256 over the pages of a random prompt, which the kernels of attention and of linear layers have gone into. If
// these change, raise kNumericsVersion and record them anew. Those of latents depend on latent_classes, too.
struct GoldenPages {
  const char* isa;
  const char* format;
  const char* weight_dtype;
  bool latents;
  const char* digest;
};
constexpr int kRecordedVersion = 3;
constexpr GoldenPages kGolden[] = {
    {"portable", "fp32", "auto", false, "2c4a95629c66de2a86da3da512e2c5d1b1fed80beaf7dc5d0973a49bc9415704"},
    {"portable", "int4", "auto", false, "2f051a3383a018e83574c5dc1f896596b9b374242b7bb563c100a74ee8ecc0ca"},
    {"portable", "k=int8,v=fp8_e4m3", "auto", false,
     "99d102136ac4175b4196d3aaf07b885791ae1bc15d3f59295c59f02c19a83cda"},
    {"portable", "bf16", "int8", false, "097e751e07a201a052aa91905130bb5245c834cb50673f97b4d64dd01d989b78"},
    {"portable", "bf16", "int4", false, "009084374cd0151b70efde2faed1d37a5dacfb1d9df263c59e7b62107e2a8093"},
    {"portable", "bf16", "bf16", false, "4728084be3007371540f692099e510e23065d64b6dd113e43a9af4d2d7fee4b9"},
    {"portable", "mla_fp8", "auto", true, "595817b5c0f73acb3fb902551c5ace4eb48bd6421e959c322cea18f9675c327f"},
    {"avx2", "fp32", "auto", false, "0c012a4d72014ac64042f27b3784e2194188f8c9d7c645e819b7d1e9f3a7a4e8"},
    {"avx2", "int4", "auto", false, "983ae90e200a5c12d167299270d33370d6457f1f2241d060719b84bfbfa8bd9e"},
    {"avx2", "k=int8,v=fp8_e4m3", "auto", false, "64d265fec17ebfdbb6a9db65ce5b4910164452f7ef5bf8d9e6911685f100cc46"},
    {"avx2", "bf16", "int8", false, "a70d971d0d4611f8651b023ed1edcf5e9adc1f5d2b430701fae791234b356590"},
    {"avx2", "bf16", "int4", false, "9b9bae234aa80847f442c6e9acc659aac377e1fafec8a4b3c5084907ed20a276"},
    {"avx2", "bf16", "bf16", false, "87af7553d627a7695c4298e2ae39b4e0731fe10b4fbe6620b62e3e472f4f7124"},
    {"avx2", "mla_fp8", "auto", true, "79d7e857c363e0775f391cc1a752baaab61d58eae251456587b16d65607a3331"},
    {"avx512", "fp32", "auto", false, "0c012a4d72014ac64042f27b3784e2194188f8c9d7c645e819b7d1e9f3a7a4e8"},
    {"avx512", "int4", "auto", false, "983ae90e200a5c12d167299270d33370d6457f1f2241d060719b84bfbfa8bd9e"},
    {"avx512", "k=int8,v=fp8_e4m3", "auto", false, "64d265fec17ebfdbb6a9db65ce5b4910164452f7ef5bf8d9e6911685f100cc46"},
    {"avx512", "bf16", "int8", false, "a70d971d0d4611f8651b023ed1edcf5e9adc1f5d2b430701fae791234b356590"},
    {"avx512", "bf16", "int4", false, "9b9bae234aa80847f442c6e9acc659aac377e1fafec8a4b3c5084907ed20a276"},
    {"avx512", "bf16", "bf16", false, "87af7553d627a7695c4298e2ae39b4e0731fe10b4fbe6620b62e3e472f4f7124"},
    {"avx512", "mla_fp8", "auto", true, "4371c0839396ddf78431b13d8eaa783a05856535b7705c85388b43cdc5adf974"},
    {"avx512fp16", "fp32", "auto", false, "0c012a4d72014ac64042f27b3784e2194188f8c9d7c645e819b7d1e9f3a7a4e8"},
    {"avx512fp16", "int4", "auto", false, "983ae90e200a5c12d167299270d33370d6457f1f2241d060719b84bfbfa8bd9e"},
    {"avx512fp16", "k=int8,v=fp8_e4m3", "auto", false,
     "0323db60f2360e2797cbbd3d70bd33cb6654ff71c68b812164bce3297476f96d"},
    {"avx512fp16", "bf16", "int8", false, "a70d971d0d4611f8651b023ed1edcf5e9adc1f5d2b430701fae791234b356590"},
    {"avx512fp16", "bf16", "int4", false, "9b9bae234aa80847f442c6e9acc659aac377e1fafec8a4b3c5084907ed20a276"},
    {"avx512fp16", "bf16", "bf16", false, "87af7553d627a7695c4298e2ae39b4e0731fe10b4fbe6620b62e3e472f4f7124"},
    {"zen4", "fp32", "auto", false, "0c012a4d72014ac64042f27b3784e2194188f8c9d7c645e819b7d1e9f3a7a4e8"},
    {"zen4", "int4", "auto", false, "983ae90e200a5c12d167299270d33370d6457f1f2241d060719b84bfbfa8bd9e"},
    {"zen4", "k=int8,v=fp8_e4m3", "auto", false, "36406a3d78555e7a583ad060d322be7be587edaaf09d3a6f2b305fa8d99fd447"},
    {"zen4", "bf16", "int8", false, "0eb9099d719de7adcb7c70bd531ffafe1651aca6985d1eede94d9f175a13bd63"},
    {"zen4", "bf16", "int4", false, "6bf0f61650f51d8390254b947037171a64a4c16249f1a7f526348eba8f71a270"},
    {"zen4", "bf16", "bf16", false, "e6cbb15a25632c009a3cfc276f9ef77b7bd5a51da5f3736599f44b27f497cbe8"},
    {"zen4", "mla_fp8", "auto", true, "1d52c4cc7c5450ad2762f08ec5748d76887dcfad80ac17d1ece1ce8cefa243b1"},
};

// The digests are of canonical bytes after a header of JSON, as pages were exported when they were recorded.
std::string RecordedBytes(const ExportedPage& exported) {
  std::string json = PageHeaderToJson(exported.header);
  if (exported.kind == formats::RecordKind::kExact) {
    const std::string_view quantized = R"("record":"quantized")";
    json.replace(json.find(quantized), quantized.size(), R"("record":"exact")");
  }
  json.resize((json.size() + 15) / 16 * 16, ' ');
  const std::vector<uint8_t> payload = exported.Canonical();
  std::string bytes = "KVANTAPG";
  const auto append = [&bytes](auto number) { bytes.append(reinterpret_cast<const char*>(&number), sizeof number); };
  append(uint32_t{1});
  append(static_cast<uint32_t>(json.size()));
  append(uint64_t{payload.size()});
  const std::string rest = json + std::string(payload.begin(), payload.end());
  const std::string summed = bytes + rest;
  append(uint64_t{XXH64(summed.data(), summed.size(), 0)});
  return bytes + rest;
}

std::string PagesDigest(const GoldenPages& golden) {
  EngineConfig config = TinyConfig(golden.latents ? LatentModel() : Model(), golden.format);
  config.isa = golden.isa;
  config.weight_dtype = golden.weight_dtype;
  Engine engine(config);
  std::mt19937_64 random(1);
  const auto tokens = RandomTokens(random, 80);
  std::vector<float> logits(tokens.size() * 96);
  engine.Logits(tokens, 0, logits, true);
  std::string bytes;
  for (int page = 0; page < 5; ++page) bytes += RecordedBytes(Export(engine, tokens, page));
  return store::Hex(store::IdentityKey(bytes));
}

TEST(CacheIdentity, PageBytesAreThoseOfTheNumericsVersion) {
#ifndef __x86_64__
  GTEST_SKIP() << "recorded on x86-64, whose C library rounds some functions otherwise";
#endif
  EXPECT_EQ(kNumericsVersion, kRecordedVersion);
  const std::span<const char* const> units = kernels::RunnableIsas();
  for (const GoldenPages& golden : kGolden) {
    const auto runs = [&](const char* unit) { return std::string_view(unit) == golden.isa; };
    if (std::ranges::none_of(units, runs)) continue;  // recorded for another CPU
    EXPECT_EQ(PagesDigest(golden), golden.digest) << golden.isa << ", " << golden.format << ", weights "
                                                  << golden.weight_dtype << (golden.latents ? ", MLA" : "");
  }
}

TEST(CacheIdentity, NamesAllThatPagesDependOn) {
  const weights::TempFolder folder;
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
  // The order of attention to latents has changed since version 3 of the arithmetic.
  constexpr const char* kClasses = R"("latent_classes":4)";
  EXPECT_EQ(base.find(kClasses), base.npos);
  config = TinyConfig(LatentModel(), "mla_int4");
  EXPECT_NE(CacheIdentity(LoadComponents(config)).find(kClasses), base.npos);
}

// Machines whose units round differently must not share pages.
TEST(CacheIdentity, NamesTheUnitThatRunsForAuto) {
  const weights::TempFolder folder;
  EngineConfig config = TinyConfig(Model(), "int4");
  config.kv_cache_dir = folder.Path();
  for (const char* unit : kernels::RunnableIsas()) {
    config.isa = unit;
    const std::string identity = CacheIdentity(LoadComponents(config));
    config.isa = "auto";
    const IsaEnvironment forced(unit);
    const EngineComponents components = LoadComponents(config);
    EXPECT_EQ(components.isa, unit);
    EXPECT_EQ(CacheIdentity(components), identity);
  }
  const std::string best = [&] {
    const IsaEnvironment none(nullptr);
    return CacheIdentity(LoadComponents(config));
  }();
  const IsaEnvironment automatic("auto");
  EXPECT_EQ(CacheIdentity(LoadComponents(config)), best);
}

#ifdef __x86_64__
// Linux refuses tiles to a process with a signal stack that is too small for their state.
[[noreturn]] void PrintUnitWithoutTiles(const EngineConfig& config) {
  static std::array<char, 8192> stack;
  stack_t small{};
  small.ss_sp = stack.data();
  small.ss_size = stack.size();
  if (sigaltstack(&small, nullptr) != 0) std::perror("sigaltstack");
  const IsaEnvironment none(nullptr);
  std::fprintf(stderr, "runs %s\n", LoadComponents(config).isa.c_str());
  std::_Exit(0);
}

TEST(CacheIdentityDeathTest, NamesTheUnitThatRunsWithoutAmxPermission) {
  const std::span<const char* const> units = kernels::RunnableIsas();
  if (std::string_view(units.front()) != "amx") GTEST_SKIP() << "no AMX on this CPU";
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process that does not have the permission yet
  EXPECT_EXIT(PrintUnitWithoutTiles(TinyConfig(Model(), "int4")), testing::ExitedWithCode(0),
              std::string("runs ") + units[1] + "\n");
}
#endif

}  // namespace
}  // namespace kvanta::engine
