#include <gtest/gtest.h>

#include "engine/requests.h"
#include "formats/page_file.h"

namespace kvanta::engine {
namespace {

TEST(ExportPage, IsASelfDescribingFileOfTheAllocatedBytes) {
  for (const char* format : {"bf16", "fp8_e4m3", "int8", "int4"}) {
    EngineConfig config = TinyConfig(Model(), format);
    Engine engine(config);
    std::mt19937_64 random(1);
    const auto prompt = RandomTokens(random, 64);
    RunOne(engine, {.id = "a", .prompt = prompt, .sampling = Greedy(1)});
    const CachePlan plan = PlanCacheBytes(config);
    for (int index = 0; index < 4; ++index) {
      const std::vector<uint8_t> file = engine.ExportPage(prompt, index);
      const formats::PageFile page = formats::ReadPageFile(file, "page");
      const bool exact = page.header.record == formats::RecordKind::kExact;
      EXPECT_EQ(exact, std::string(format) == "int4" && index == 0) << "only a sink has no quantized record";
      EXPECT_EQ(static_cast<int64_t>(page.payload.size()), exact ? plan.exact_page_bytes : plan.page_bytes);
      EXPECT_EQ(page.header.layout.layers.size(), 2u);
      EXPECT_EQ(page.header.scales.empty(), std::string(format) != "fp8_e4m3");
    }
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

TEST(ExportPage, RefusesWhatIsNotCached) {
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
