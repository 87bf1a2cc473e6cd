#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "engine/exported_page.h"
#include "engine/requests.h"
#include "formats/format.h"
#include "kvanta/cache_folder.h"

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
      const ExportedPage exported = Export(engine, prompt, index);
      const bool exact = exported.kind == formats::RecordKind::kExact;
      const bool sink = KvScheme::Parse(scheme).sink_pages > 0;
      EXPECT_EQ(exact, sink && index == 0) << "only a sink has no quantized record";
      const auto payload_bytes = std::ssize(exported.page.payload);
      EXPECT_EQ(payload_bytes, exact ? plan.exact_page_bytes : plan.page_bytes);
      if (!exact) {
        EXPECT_EQ(static_cast<double>(payload_bytes), config.page_size * engine.Stats().bytes_per_token);
      }
      EXPECT_EQ(exported.header.layout.layers.size(), 2u);
      const formats::LayerScheme& layer = exported.header.layout.layers[0];
      const bool has_scales = layer.k.format->scaling.per_head || layer.v.format->scaling.per_head;
      EXPECT_EQ(exported.header.scales.empty(), !has_scales) << "static scales";
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
    const ExportedPage exported = Export(engine, prompt, 1);
    EXPECT_EQ(std::ssize(exported.page.payload), int64_t{2} * bytes * config.page_size) << scheme;
    EXPECT_EQ(exported.header.layout.layers[1].rope_dim, 16) << scheme;
  }
}

// An exported page is the file of the cache folder, and describes itself.
TEST(ExportPage, IsTheFolderFileWithItsIdentity) {
  const weights::TempFolder folder;
  EngineConfig config = TinyConfig(Model(), "int4");
  config.kv_cache_dir = folder.Path();
  Engine engine(config);
  std::mt19937_64 random(2);
  const auto prompt = RandomTokens(random, 70);
  std::vector<float> logits(prompt.size() * 96);
  engine.Logits(prompt, 0, logits, true);
  engine.FlushPrefixCache();
  for (int index = 0; index < 4; ++index) {
    const ExportedPage exported = Export(engine, prompt, index);
    const std::string name = store::FileName(exported.page.id);
    const std::string path =
        fmt::format("{}/{}/{}/{}", folder.Path(), store::IdentityName(exported.page.identity), name.substr(0, 2), name);
    const PageFileInfo stored = ShowPageFile(path);
    EXPECT_EQ(stored.fault, "") << path;
    EXPECT_EQ(stored.version, 1);
    const std::string_view bytes_of_copy(reinterpret_cast<const char*>(exported.file.data()), exported.file.size());
    const std::string copy = folder.Write("copy", bytes_of_copy);
    const PageFileInfo shown = ShowPageFile(copy);
    EXPECT_EQ(shown.fault, "");
    EXPECT_EQ(shown.version, 2);
    EXPECT_EQ(shown.key, stored.key);
    EXPECT_EQ(shown.identity, stored.identity);
    EXPECT_NE(shown.identity, "");
    EXPECT_EQ(shown.tokens, stored.tokens);
    EXPECT_EQ(shown.tokens, std::vector<int32_t>(prompt.begin() + 16 * index, prompt.begin() + 16 * (index + 1)));
    std::ifstream in(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(in), {}};
    const auto& payload = exported.page.payload;
    EXPECT_EQ(bytes.substr(bytes.size() - payload.size()), std::string(payload.begin(), payload.end()));
  }
  EXPECT_THROW(ShowPageFile(folder.Path() + "/x"), InputError);
}

// Whole by its checksum, but not of the layout that its identity has: what a faulty or hostile writer would leave.
TEST(ExportPage, PayloadsThatTheIdentityDoesNotDescribeAreNamed) {
  const weights::TempFolder folder;
  EngineConfig config = TinyConfig(Model(), "int4");
  config.kv_cache_dir = folder.Path();
  Engine engine(config);
  std::mt19937_64 random(2);
  const auto prompt = RandomTokens(random, 33);
  std::vector<float> logits(prompt.size() * 96);
  engine.Logits(prompt, 0, logits, true);
  engine.FlushPrefixCache();
  ASSERT_THAT(VerifyCacheFolder(folder.Path())[0].damaged, testing::IsEmpty());
  const ExportedPage exported = Export(engine, prompt, 1);
  store::RecordId id = exported.page.id;
  const std::vector<int32_t> tokens(prompt.begin() + 16, prompt.begin() + 32);
  const auto write = [&](size_t payload_bytes) {
    const auto payload = exported.page.payload.first(payload_bytes);
    std::vector<uint8_t> file = store::EncodePageHeader(exported.page.identity, id, tokens, payload);
    file.insert(file.end(), payload.begin(), payload.end());
    const std::string name = store::FileName(id);
    const std::string path =
        fmt::format("{}/{}/{}/{}", folder.Path(), store::IdentityName(exported.page.identity), name.substr(0, 2), name);
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(file.data()), std::ssize(file));
    return path;
  };
  const std::string path = write(exported.page.payload.size() - 1);
  EXPECT_THAT(ShowPageFile(path).fault, testing::HasSubstr("its identity describes"));
  EXPECT_THAT(VerifyCacheFolder(folder.Path())[0].damaged,
              testing::ElementsAre(testing::HasSubstr("its identity describes")));
  id.group = 1;
  EXPECT_THAT(ShowPageFile(write(exported.page.payload.size())).fault, testing::HasSubstr("KV cache group 1"));
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
