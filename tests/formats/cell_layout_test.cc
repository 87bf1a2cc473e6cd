// Planes, shapes and the cache's layout: offsets, bijections, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "formats/cell_layout.h"
#include "formats/page_record.h"
#include "formats/scheme.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::vector<uint8_t> RandomBytes(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(static_cast<size_t>(n));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

std::string Refusal(std::string_view format, CellShape shape) {
  try {
    PlanCell(Find(format), shape);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(PlanCell, BytesOfEveryFormatAtHeadDim128) {
  const std::vector<std::pair<const char*, double>> bits = {
      {"fp32", 32}, {"bf16", 16}, {"fp16", 16}, {"fp8_e4m3", 8}, {"fp8_e5m2", 8}, {"int8", 8.125}, {"int4", 4.5}};
  ASSERT_EQ(bits.size(), All().size());
  for (const auto& [name, expected] : bits) {
    for (const int tokens : {16, 32, 64, 128}) {
      const CellPlanes planes = PlanCell(Find(name), {tokens, 128});
      EXPECT_EQ(static_cast<double>(planes.bytes) * 8 / (tokens * 128), expected) << name;
    }
  }
}

TEST(PlanCell, PlanesFollowEachOtherAligned) {
  for (const Format& format : All()) {
    for (const int head_dim : {32, 64, 96, 128, 256}) {
      const CellPlanes planes = PlanCell(format, {64, head_dim});
      EXPECT_EQ(planes.codes, 0);
      EXPECT_EQ(planes.block_scales, 64 * head_dim * format.code_bits / 8);
      EXPECT_EQ(planes.token_scales - planes.block_scales,
                format.scale == Scale::kPerBlock ? 64 * head_dim / 32 * 2 : 0);
      EXPECT_EQ(planes.bytes - planes.token_scales, format.scale == Scale::kPerToken ? 128 : 0);
      EXPECT_EQ(planes.block_scales % 16 + planes.token_scales % 16 + planes.bytes % 16, 0);
    }
  }
}

TEST(PlanCell, RefusesShapesWithTheAlternatives) {
  EXPECT_THAT(Refusal("int4", {64, 80}), AllOf(HasSubstr("32"), HasSubstr("80"), HasSubstr("16"), HasSubstr("int8")));
  EXPECT_THAT(Refusal("int4", {64, 80}), testing::Not(HasSubstr("int4,")));
  EXPECT_THAT(Refusal("int4", {64, 8}), HasSubstr("int8"));
  EXPECT_EQ(Refusal("int8", {64, 8}), "");
  EXPECT_EQ(Refusal("int8", {64, 80}), "");
  EXPECT_EQ(Refusal("int4", {64, 96}), "");
  EXPECT_THAT(Refusal("int8", {48, 64}), AllOf(HasSubstr("48"), HasSubstr("16, 32, 64 or 128")));
  EXPECT_THAT(Refusal("bf16", {64, 12}), HasSubstr("12"));
  EXPECT_THAT(Refusal("bf16", {64, 0}), HasSubstr("0"));
  EXPECT_THAT(Refusal("bf16", {64, 1 << 20}), HasSubstr("1024"));
}

// The drawing in cell_layout.h, written out.
TEST(CellLayout, OffsetsAreThoseOfTheDrawing) {
  const CellShape shape{64, 32};
  const Format& int8 = Find("int8");
  EXPECT_EQ(CodeOffset(SideKind::kK, int8, shape, 0, 4), 64);  // unit 1 of token 0: next line
  EXPECT_EQ(CodeOffset(SideKind::kK, int8, shape, 1, 0), 4);   // token 1 beside token 0
  EXPECT_EQ(CodeOffset(SideKind::kK, int8, shape, 17, 6), 512 + 64 + 4 + 2);
  EXPECT_EQ(CodeOffset(SideKind::kV, int8, shape, 1, 0), 1);  // the same channel of 4 tokens
  EXPECT_EQ(CodeOffset(SideKind::kV, int8, shape, 5, 3), 128 + 12 + 1);
  const Format& bf16 = Find("bf16");
  EXPECT_EQ(CodeOffset(SideKind::kV, bf16, shape, 1, 3), 4 + 2 + 1);  // channel 1, second of 2 tokens, high byte
  EXPECT_EQ(CodeOffset(SideKind::kV, Find("fp32"), shape, 3, 5), 3 * 128 + 5);
  EXPECT_EQ(CodeOffset(SideKind::kV, Find("int4"), shape, 6, 2), 64 + 8 + 2);
}

TEST(CellLayout, CodesArePermutedOneToOne) {
  for (const Format& format : All()) {
    for (const SideKind kind : {SideKind::kK, SideKind::kV}) {
      for (const CellShape shape : {CellShape{16, 32}, CellShape{32, 96}, CellShape{64, 64}}) {
        const CellPlanes planes = PlanCell(format, shape);
        std::vector<bool> hit(static_cast<size_t>(planes.block_scales), false);
        for (int token = 0; token < shape.tokens; ++token) {
          for (int64_t byte = 0; byte < planes.row_bytes; ++byte) {
            const int64_t offset = CodeOffset(kind, format, shape, token, byte);
            ASSERT_GE(offset, 0);
            ASSERT_LT(offset, planes.block_scales);
            ASSERT_FALSE(hit[static_cast<size_t>(offset)]) << format.name << " " << token << " " << byte;
            hit[static_cast<size_t>(offset)] = true;
          }
        }
      }
    }
  }
}

TEST(CellLayout, ConversionsAreInverseAndFollowCodeOffset) {
  for (const Format& format : All()) {
    for (const SideKind kind : {SideKind::kK, SideKind::kV}) {
      for (const CellShape shape : {CellShape{16, 64}, CellShape{128, 96}}) {
        const CellPlanes planes = PlanCell(format, shape);
        const auto canonical = RandomBytes(planes.bytes, 7);
        std::vector<uint8_t> cell(canonical.size());
        FromCanonical(kind, format, shape, canonical.data(), cell.data());
        std::vector<uint8_t> back(canonical.size());
        ToCanonical(kind, format, shape, cell.data(), back.data());
        EXPECT_EQ(back, canonical) << format.name;
        for (int token = 0; token < shape.tokens; ++token) {
          for (int64_t byte = 0; byte < planes.row_bytes; ++byte) {
            ASSERT_EQ(cell[static_cast<size_t>(CodeOffset(kind, format, shape, token, byte))],
                      canonical[static_cast<size_t>(token * planes.row_bytes + byte)]);
          }
          for (int block = 0; block < planes.blocks; ++block) {  // [t][b] -> [b][t], two bytes each
            ASSERT_EQ(cell[static_cast<size_t>(planes.block_scales + (block * shape.tokens + token) * 2)],
                      canonical[static_cast<size_t>(planes.block_scales + (token * planes.blocks + block) * 2)]);
          }
        }
      }
    }
  }
}

CacheLayout Plan(const std::vector<std::string>& schemes, LayerShape shape, int page_size) {
  std::vector<KvScheme> parsed;
  for (const std::string& text : schemes) parsed.push_back(KvScheme::Parse(text));
  return PlanCache(parsed, std::vector<LayerShape>(parsed.size(), shape), page_size);
}

TEST(PlanCache, CellsTileTheRecordsWithoutGapOrOverlap) {
  const CacheLayout layout = Plan({"bf16", "k=int8,v=int4", "int4+exact=none", "int4", "fp8"}, {3, 64}, 64);
  std::vector<int> covered(static_cast<size_t>(layout.page_bytes), 0);
  std::vector<int> exact_covered(static_cast<size_t>(layout.exact_page_bytes), 0);
  const auto cover = [](std::vector<int>& bytes, int64_t begin, int64_t n) {
    for (int64_t i = begin; i < begin + n; ++i) ++bytes[static_cast<size_t>(i)];
  };
  for (const LayerScheme& layer : layout.layers) {
    for (int head = 0; head < layer.kv_heads; ++head) {
      cover(covered, layer.KCell(head), layer.k.planes.bytes);
      cover(covered, layer.VCell(head), layer.v.planes.bytes);
      if (!layer.exact_open) continue;
      cover(exact_covered, layer.ExactKCell(head), layer.ExactCellBytes());
      cover(exact_covered, layer.ExactVCell(head), layer.ExactCellBytes());
    }
  }
  EXPECT_THAT(covered, testing::Each(1));
  EXPECT_THAT(exact_covered, testing::Each(1));
  EXPECT_EQ(layout.exact_page_bytes, 2 * 3 * 2 * 64 * 64 * 2);  // two of the layers keep exact pages
}

TEST(PlanCache, IdentityTellsApartWhatChangesBytes) {
  std::set<std::string> identities;
  for (const char* scheme : {"int4", "int4-hadamard", "int4+mean", "int4+exact=none", "int8", "k=int8,v=int4"}) {
    for (const LayerShape shape : {LayerShape{3, 64}, LayerShape{6, 32}, LayerShape{3, 32}}) {
      for (const int page_size : {32, 64}) identities.insert(Plan({scheme, scheme}, shape, page_size).Identity());
    }
  }
  EXPECT_EQ(identities.size(), 6U * 3U * 2U);
  EXPECT_NE(Plan({"int4", "int8"}, {3, 64}, 64).Identity(), Plan({"int8", "int4"}, {3, 64}, 64).Identity());
}

TEST(PlanCache, RefusesWhatALayerCannotTake) {
  EXPECT_THROW(Plan({"int4"}, {3, 80}, 64), InputError);
  EXPECT_THROW(Plan({"int8"}, {0, 64}, 64), InputError);
  EXPECT_THROW(Plan({"int8"}, {3, 64}, 63), InputError);
  EXPECT_THROW(Plan({}, {3, 64}, 64), InputError);
  KvScheme scheme = KvScheme::Parse("int8");
  scheme.v.mean = true;
  EXPECT_THROW(PlanCache({scheme}, {{3, 64}}, 64), InputError);
  scheme.v.mean = false;
  scheme.sink_pages = 1;
  EXPECT_THROW(PlanCache({scheme}, {{3, 64}}, 64), InputError);
}

TEST(PageRecord, CanonicalAndBack) {
  const CacheLayout layout = Plan({"bf16", "k=int8,v=int4", "int4"}, {2, 96}, 32);
  for (const RecordKind kind : {RecordKind::kQuantized, RecordKind::kExact}) {
    const auto record = RandomBytes(RecordBytes(layout, kind), 3);
    const auto canonical = RecordToCanonical(layout, kind, record);
    EXPECT_NE(canonical, record);
    EXPECT_EQ(RecordFromCanonical(layout, kind, canonical), record);
  }
  EXPECT_THROW(RecordToCanonical(layout, RecordKind::kExact, RandomBytes(16, 1)), InputError);
}

}  // namespace
}  // namespace kvanta::formats
