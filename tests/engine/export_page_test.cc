#include <gtest/gtest.h>

#include "engine/requests.h"
#include "formats/format.h"
#include "formats/page_file.h"

namespace kvanta::engine {
namespace {

// Three counts of the same bytes: the plan's, the engine's and those of a page on disk without its header.
TEST(ExportPage, IsASelfDescribingFileOfTheAllocatedBytes) {
  const TinyModel windowed({.sliding_window = 40});
  std::vector<std::string> schemes = {"k=int8,v=int4", "k=bf16,v=fp8", "int4+exact=none", "int8+exact=open+sink=1"};
  for (const formats::Format& format : formats::All()) {
    if (!formats::IsAllocated(format.code)) schemes.emplace_back(format.name);  // needs a calibrated model
  }
  for (size_t i = 0; i < 2 * schemes.size(); ++i) {
    const std::string& scheme = schemes[i / 2];
    SCOPED_TRACE(scheme);
    const TinyModel& model = ModelFor(scheme);
    EngineConfig config = TinyConfig(i % 2 == 0 || &model != &Model() ? model : windowed, scheme);
    const bool tiled = formats::Find(KvScheme::Parse(scheme).k.format).scaling.token_group != 0;
    config.page_size = tiled ? 32 : 16;
    config.max_model_len = 4 * config.page_size + 1;
    config.max_num_batched_tokens = std::max<int64_t>(config.max_num_batched_tokens, config.page_size);
    Engine engine(config);
    std::mt19937_64 random(1);
    const auto prompt = RandomTokens(random, 4 * config.page_size);
    RunOne(engine, {.id = "a", .prompt = prompt, .sampling = Greedy(1)});
    const CachePlan plan = PlanCacheBytes(config);
    for (int index = 0; index < 4; ++index) {
      const std::vector<uint8_t> file = engine.ExportPage(prompt, index);
      const formats::PageFile page = formats::ReadPageFile(file, "page");
      const bool exact = page.header.record == formats::RecordKind::kExact;
      const bool sink = KvScheme::Parse(scheme).sink_pages > 0;
      EXPECT_EQ(exact, sink && index == 0) << "only a sink has no quantized record";
      EXPECT_EQ(static_cast<int64_t>(page.payload.size()), exact ? plan.exact_page_bytes : plan.page_bytes);
      if (!exact) {
        EXPECT_EQ(static_cast<double>(page.payload.size()), config.page_size * engine.Stats().bytes_per_token);
      }
      EXPECT_EQ(page.header.layout.layers.size(), 2u);
      const formats::LayerScheme& layer = page.header.layout.layers[0];
      const bool has_scales = layer.k.format->scaling.per_head || layer.v.format->scaling.per_head;
      EXPECT_EQ(page.header.scales.empty(), !has_scales) << "static scales";
    }
  }
}

// Latents are stored once: rank 64 and 16 rotated channels.
TEST(ExportPage, LatentsHaveTheirBytes) {
  const std::pair<const char*, int> schemes[] = {
      {"fp32", 80 * 4},          {"bf16", 80 * 2},      {"mla_fp8", 64 + 4 + 32},  {"mla_fp8_e5m2", 64 + 4 + 32},
      {"mla_int8", 64 + 4 + 32}, {"int8", 64 + 4 + 32}, {"mla_int4", 32 + 4 + 32}, {"int4", 32 + 4 + 32},
      {"mla_nvfp4", 32 + 4 + 32}};
  for (const auto& [scheme, bytes] : schemes) {
    const EngineConfig config = TinyConfig(LatentModel(), scheme);
    EXPECT_EQ(PlanCacheBytes(config).bytes_per_token, 2.0 * bytes) << scheme;
    Engine engine(config);
    EXPECT_EQ(engine.Stats().bytes_per_token, 2.0 * bytes) << scheme;
    std::mt19937_64 random(4);
    const auto prompt = RandomTokens(random, 3 * config.page_size);
    RunOne(engine, {.id = "a", .prompt = prompt, .sampling = Greedy(1)});
    const formats::PageFile page = formats::ReadPageFile(engine.ExportPage(prompt, 1), "page");
    EXPECT_EQ(static_cast<int64_t>(page.payload.size()), int64_t{2} * bytes * config.page_size) << scheme;
    EXPECT_EQ(page.header.layout.layers[1].rope_dim, 16) << scheme;
  }
}

TEST(ExportPage, TheSameTokensGiveTheSameBytes) {
  std::mt19937_64 random(2);
  const auto prompt = RandomTokens(random, 70);
  EngineConfig config = TinyConfig(Model(), "int4");
  Engine whole(config);
  Engine decoded(config);
  std::vector<float> logits(prompt.size() * 96);
  whole.Logits(prompt, 0, logits, true);
  decoded.Logits(prompt, 1, logits, true);
  for (int index = 0; index < 4; ++index) {
    EXPECT_EQ(whole.ExportPage(prompt, index), decoded.ExportPage(prompt, index)) << "page " << index;
  }
}

TEST(ExportPage, RefusesPagesThatAreNotCached) {
  Engine engine(TinyConfig(Model(), "int8"));
  std::mt19937_64 random(3);
  const auto prompt = RandomTokens(random, 40);
  EXPECT_THROW(engine.ExportPage(prompt, 0), InputError);
  RunOne(engine, {.id = "a", .prompt = prompt, .sampling = Greedy(1)});
  EXPECT_NO_THROW(engine.ExportPage(prompt, 1));
  EXPECT_THROW(engine.ExportPage(prompt, 2), InputError) << "not closed";
  EXPECT_THROW(engine.ExportPage(prompt, -1), InputError);
  EXPECT_THROW(engine.ExportPage({}, 0), InputError);
}

}  // namespace
}  // namespace kvanta::engine
