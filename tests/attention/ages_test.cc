// Precision by age: a query reads each page from the level that its distance says, on every instruction set, and no bit
// depends on steps, batches or threads.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "all_cases.h"
#include "attention/cache_harness.h"
#include "formats/cell_layout.h"
#include "formats/trellis.h"

namespace kvanta::attention {
namespace {

using cache::PageKind;

struct AgesCase {
  std::string scheme;
  int rope_dim = 0;
};

// Every kind of first level, and of later ones; distances of one page, and of several.
std::vector<AgesCase> AgesCases() {
  return {{"0=int8,32=t3+sink=0"},
          {"0=int8,16=int4,48=t2"},
          {"0=int4,32=int2_g32,48=t2+sink=2"},
          {"0=int4+exact=2,48=t3"},
          {"0=k=int8+mean+outliers=2,v=int8,32=k=int5_g32,v=int4+sink=1"},
          {"0=fp8+hadamard,16=t4,32=k=int3_g32,v=t2+sink=0"},
          {"0=kivi4,32=kivi2"},
          {"0=bf16,16=kivi4,48=mxfp4+sink=0"},
          {"0=bf16,16=mla_fp8,32=mla_int4+sink=0", 16},
          {"0=mla_fp8,32=mla_int4", 8}};
}

HarnessOptions OptionsOf(const AgesCase& each, int length) {
  const bool has_tiles = each.scheme.find("kivi") != std::string::npos;
  return {.scheme = each.scheme,
          .heads = 4,
          .kv_heads = 2,
          .head_dim = 64,
          .rope_dim = each.rope_dim,
          .page_size = has_tiles ? 32 : 16,
          .lengths = {length}};
}

// Ages in tokens of pages of 16, as multiples of a page of 32.
AgesCase WithPage(AgesCase each) {
  if (each.scheme.find("kivi") == std::string::npos) return each;
  for (const auto& [from, to] : {std::pair(",48=", ",96="), std::pair(",32=", ",64="), std::pair(",16=", ",32=")}) {
    if (const size_t at = each.scheme.find(from); at != std::string::npos) each.scheme.replace(at, 4, to);
  }
  return each;
}

class AgesTest : public ::testing::TestWithParam<testing::Unit> {};

INSTANTIATE_TEST_SUITE_P(Units, AgesTest, ::testing::ValuesIn(testing::Units()),
                         [](const auto& unit) { return unit.param.name; });

double Rms(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::pow(double{a[i]} - double{b[i]}, 2);
  return std::sqrt(sum / static_cast<double>(a.size()));
}

// A kernel that read another level than the reference would err as much as the formats differ.
TEST_P(AgesTest, ReadsTheLevelsThatTheReferenceReads) {
  uint32_t seed = 1;
  for (const AgesCase& listed : AgesCases()) {
    const AgesCase each = WithPage(listed);
    for (const int window : {0, 90}) {
      SCOPED_TRACE(fmt::format("{} window {}", each.scheme, window));
      HarnessOptions options = OptionsOf(each, 260);
      options.sliding_window = window;
      CacheHarness harness(options, seed++);
      const std::unique_ptr<Backend> reference = MakeReferenceBackend(harness.store(), harness.config());
      const std::unique_ptr<Backend> backend = harness.CpuBackend(*GetParam().table, 2);
      harness.Run(*backend, {{{0, 100}}, {{0, 1}}, {{0, 40}}, {{0, 119}}}, reference.get());
      const CacheHarness::Sequence& sequence = harness.sequences()[0];
      const double size = Rms(sequence.expected, std::vector<float>(sequence.expected.size()));
      EXPECT_LT(Rms(sequence.out, sequence.expected), 0.012 * size);
    }
  }
}

TEST_P(AgesTest, ChunksBatchesAndThreadsGiveTheSameBits) {
  uint32_t seed = 50;
  size_t turn = GetParam().name.size();  // each case with one of the visibilities, another one on most units
  for (const AgesCase& listed : AgesCases()) {
    const AgesCase each = WithPage(listed);
    std::mt19937 random(seed);
    ++turn;
    const cache::Visibility all[] = {
        {}, cache::SlidingWindow(75), cache::Visibility{cache::VisibilityKind::kChunked, 100}};
    for (size_t which = 0; which < std::size(all); ++which) {
      if (!testing::AllCases() && (which + turn) % std::size(all) != 0) continue;
      const cache::Visibility& visibility = all[which];
      SCOPED_TRACE(fmt::format("{} span {}, seed {}", each.scheme, visibility.span, seed));
      HarnessOptions options = OptionsOf(each, 203);
      options.lengths = {203, 90};
      if (visibility.kind == cache::VisibilityKind::kChunked) options.chunk = visibility.span;
      if (visibility.kind == cache::VisibilityKind::kSlidingWindow) options.sliding_window = visibility.span;
      CacheHarness one(options, seed), two(options, seed++);
      const std::unique_ptr<Backend> serial = one.CpuBackend(*GetParam().table);
      const std::unique_ptr<Backend> parallel = two.CpuBackend(*GetParam().table, 4);
      for (int i = 0; i < 2; ++i) {
        for (int token = 0; token < options.lengths[static_cast<size_t>(i)]; ++token) one.RunStep(*serial, {{i, 1}});
      }
      std::vector<int> left = options.lengths;
      while (left[0] + left[1] > 0) {
        Step step;
        for (int i = 0; i < 2; ++i) {
          const int tokens = std::min<int>(left[static_cast<size_t>(i)], static_cast<int>(random() % 120));
          if (tokens == 0) continue;
          step.push_back({i, tokens});
          left[static_cast<size_t>(i)] -= tokens;
        }
        if (!step.empty()) two.RunStep(*parallel, step);
      }
      for (size_t i = 0; i < 2; ++i) {
        const std::vector<float>&a = one.sequences()[i].out, &b = two.sequences()[i].out;
        ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << "sequence " << i;
        ASSERT_EQ(one.Bytes(static_cast<int>(i)), two.Bytes(static_cast<int>(i))) << "sequence " << i;
      }
    }
  }
}

// The later level of a page: its first level decoded row by row, and encoded.
TEST_P(AgesTest, LaterLevelsAreEncodedFromTheFirst) {
  const HarnessOptions options = OptionsOf({"0=int8,32=int4+sink=0,48=t2+sink=0"}, 100);
  CacheHarness harness(options, 3);
  const std::unique_ptr<Backend> backend = harness.CpuBackend(*GetParam().table);
  harness.Append(*backend, {0, 32});
  const formats::LayerScheme& layer = harness.layout().layers[0];
  cache::PagePool& pool = harness.store();
  const uint8_t* record = pool.Record(0, PageKind::kQuantized, harness.sequences()[0].table[0].quantized);
  const std::vector<uint8_t> first(record, record + pool.RecordBytes(0, PageKind::kQuantized));
  EXPECT_EQ(harness.sequences()[0].table[0].Of(PageKind::kAged), cache::kNoPage);
  harness.Append(*backend, {0, 1});
  const cache::PageRef page = harness.sequences()[0].table[0];
  EXPECT_EQ(page.quantized, cache::kNoPage) << "no query will read it";
  for (const PageKind kind : cache::kAgedKinds) {
    const formats::AgeScheme& age = layer.ages[AgeIndex(kind)];
    const uint8_t* aged = pool.Record(0, kind, page.Of(kind));
    for (int head = 0; head < layer.kv_heads; ++head) {
      for (const bool is_key : {true, false}) {
        const formats::SideKind side = is_key ? formats::SideKind::kK : formats::SideKind::kV;
        const formats::Side &from = is_key ? layer.k : layer.v, &to = is_key ? age.k : age.v;
        const formats::AgeCells cells = layer.CellsOf(age, head);
        std::vector<uint8_t> expected(static_cast<size_t>(to.sections.bytes));
        for (int token = 0; token < layer.shape.tokens; ++token) {
          formats::RowBuffer buffer;
          std::vector<float> x(static_cast<size_t>(layer.shape.head_dim));
          formats::LoadRow(side, *from.format, layer.shape, from.sections, token,
                           first.data() + (is_key ? layer.KCell(head) : layer.VCell(head)), buffer.Sections());
          from.format->decode_row(buffer.Sections(), layer.shape.head_dim, 1.0F, x.data());
          formats::EncodeCounts counts;
          to.format->encode_row(x.data(), layer.shape.head_dim, 1.0F, buffer.Sections(), counts);
          formats::StoreRow(side, *to.format, layer.shape, to.sections, token, buffer.Sections(), expected.data());
        }
        const uint8_t* cell = aged + (is_key ? cells.k : cells.v);
        EXPECT_EQ(std::vector<uint8_t>(cell, cell + expected.size()), expected) << Name(kind) << " head " << head;
      }
    }
  }
}

TEST(AgesBatchTest, RefusesBatchesWithoutTheirLevels) {
  CacheHarness harness(OptionsOf({"0=int8,32=t3+sink=0"}, 60), 1);
  const std::unique_ptr<Backend> backend = harness.CpuBackend(*testing::Units().front().table);
  const SequenceSpan span{.start = 0, .tokens = 60, .pages = harness.sequences()[0].Tables()};
  try {
    backend->MakePlan({.sequences = {&span, 1}}, nullptr);
    FAIL();
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("page 0 has no second level's record"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace kvanta::attention
