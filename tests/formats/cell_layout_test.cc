// Planes, shapes and the cache's layout: offsets, bijections, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "formats/cell_layout.h"
#include "formats/expected_formats.h"
#include "formats/page_record.h"
#include "formats/scheme.h"
#include "formats/sides.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

std::vector<uint8_t> RandomBytes(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(static_cast<size_t>(n));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

std::string Refusal(std::string_view format, CellShape shape, bool is_key = true) {
  try {
    PlanCell(OnSide(Find(format), is_key), shape);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

// The specification's table, side by side.
TEST(PlanCell, BitsOfEveryFormatAtHeadDim128) {
  for (const ExpectedFormat& expected : kExpectedFormats) {
    for (const int tokens : {32, 64, 128}) {
      const CellShape shape{tokens, 128};
      if (!Takes(Find(expected.name), shape)) continue;  // a larger token group
      const auto of = [&](bool is_key) {
        return static_cast<double>(PlanCell(OnSide(Find(expected.name), is_key), shape).bytes) * 8 / (tokens * 128);
      };
      EXPECT_EQ(of(true), expected.k_bits) << expected.name;
      EXPECT_EQ(of(false), expected.v_bits) << expected.name;
    }
  }
}

// codes | block scales | block offsets | token scales | token offsets | channel scales | channel offsets, if present.
TEST(PlanCell, SectionsFollowEachOtherAligned) {
  int planned = 0;
  for (const NamedSide& side : EverySide()) {
    for (const int tokens : {16, 32, 64, 128}) {
      for (const int head_dim : {8, 16, 32, 64, 80, 96, 128, 256, 1024}) {
        if (!Takes(*side.format, {tokens, head_dim})) continue;
        ++planned;
        const CellSections sections = PlanCell(*side.format, {tokens, head_dim});
        const Scaling& scaling = side.format->scaling;
        const int64_t blocks =
            scaling.channels == 0 ? 0 : int64_t{tokens} * head_dim / BlockChannels(scaling, head_dim);
        const int64_t groups = scaling.token_group == 0 ? 0 : int64_t{tokens} / scaling.token_group;
        const std::vector<std::pair<int64_t, int64_t>> expected = {
            {sections.codes, int64_t{tokens} * head_dim * side.format->code_bits / 8},
            {sections.block_scales, blocks * Bytes(scaling.block)},
            {sections.block_offsets, scaling.block_offset ? blocks * 2 : 0},
            {sections.token_scales, int64_t{tokens} * Bytes(scaling.token)},
            {sections.token_offsets, scaling.token_offset ? int64_t{tokens} * 2 : 0},
            {sections.channel_scales, groups * GroupScaleBytes(scaling, head_dim)},
            {sections.channel_offsets, groups * GroupOffsetBytes(scaling, head_dim)}};
        int64_t end = 0;
        for (const auto& [begin, bytes] : expected) {
          EXPECT_EQ(begin, end) << side.text << " " << tokens << " " << head_dim;
          EXPECT_EQ(begin % 16, 0) << side.text;
          end = begin + (bytes + 15) / 16 * 16;
        }
        EXPECT_EQ(sections.bytes, end) << side.text << " " << tokens << " " << head_dim;
      }
    }
  }
  EXPECT_GT(planned, 1000);
}

TEST(PlanCell, RefusesShapesWithTheAlternatives) {
  EXPECT_THAT(Refusal("int4", {64, 80}), AllOf(HasSubstr("32"), HasSubstr("80"), HasSubstr("16"), HasSubstr("int8")));
  EXPECT_THAT(Refusal("int4", {64, 80}), Not(HasSubstr("int4,")));
  EXPECT_THAT(Refusal("int4", {64, 8}), HasSubstr("int8"));
  EXPECT_EQ(Refusal("int8", {64, 8}), "");
  EXPECT_EQ(Refusal("int8", {64, 80}), "");
  EXPECT_EQ(Refusal("int4", {64, 96}), "");
  EXPECT_THAT(Refusal("int8", {48, 64}), AllOf(HasSubstr("48"), HasSubstr("16, 32, 64 or 128")));
  EXPECT_THAT(Refusal("bf16", {64, 12}), HasSubstr("12"));
  EXPECT_THAT(Refusal("bf16", {64, 0}), HasSubstr("0"));
  EXPECT_THAT(Refusal("bf16", {64, 1 << 20}), HasSubstr("1024"));
  EXPECT_THAT(Refusal("int5_g32", {64, 80}),
              AllOf(HasSubstr("int5_g32 has blocks of 32 channels, which do not divide head_dim 80"),
                    HasSubstr("nvfp4"), Not(HasSubstr("int6_g32"))));
  EXPECT_THAT(Refusal("nvfp4", {64, 72}), AllOf(HasSubstr("16"), HasSubstr("turboquant_k8v4")));
}

TEST(PlanCell, RefusesTokenGroupsThatDoNotDivideThePage) {
  for (const char* name : {"kivi4", "kivi2"}) {
    EXPECT_THAT(Refusal(name, {16, 64}),
                AllOf(HasSubstr(name), HasSubstr("32 tokens"), HasSubstr("page of 16"), HasSubstr("32, 64 or 128")));
    EXPECT_EQ(Refusal(name, {32, 64}), "");
    EXPECT_EQ(Refusal(name, {16, 64}, false), "");  // V has no token groups
    EXPECT_THROW(PlanRows(Find(name), {33, 64}), InputError);
    EXPECT_EQ(PlanRows(Find(name), {96, 64}).channel_offsets % 16, 0);
  }
  EXPECT_THAT(Refusal("klt3_g64", {32, 64}), AllOf(HasSubstr("64 tokens"), HasSubstr("take pages of 64 or 128")));
  EXPECT_EQ(PlanCell(Find("klt3_g64"), {128, 64}).channel_scales + 2 * 48, PlanCell(Find("klt3_g64"), {128, 64}).bytes);
  EXPECT_EQ(Refusal("kivi4", {64, 72}), "");  // K: any head_dim; V: blocks of 32
  EXPECT_THAT(Refusal("kivi4", {64, 72}, false), HasSubstr("blocks of 32"));
  EXPECT_THAT(Refusal("kivi2", {64, 72}), HasSubstr("units of 16"));
  EXPECT_THAT(Refusal("turboquant_3bit_nc", {64, 80}), AllOf(HasSubstr("units of 32"), HasSubstr("head_dim 80")));
}

// The drawing in cell_layout.h, written out.
TEST(CellLayout, OffsetsAreThoseOfTheDrawing) {
  const CellShape shape{64, 32};
  const Format& int8 = Find("int8");
  EXPECT_EQ(CodeOffset(SideKind::kK, int8, shape, 0, 4), 64);  // unit 1 of token 0: next line
  EXPECT_EQ(CodeOffset(SideKind::kK, int8, shape, 1, 0), 4);   // token 1 next to token 0
  EXPECT_EQ(CodeOffset(SideKind::kK, int8, shape, 17, 6), 512 + 64 + 4 + 2);
  EXPECT_EQ(CodeOffset(SideKind::kV, int8, shape, 1, 0), 1);  // the same channel of 4 tokens
  EXPECT_EQ(CodeOffset(SideKind::kV, int8, shape, 5, 3), 128 + 12 + 1);
  const Format& bf16 = Find("bf16");
  EXPECT_EQ(CodeOffset(SideKind::kV, bf16, shape, 1, 3), 4 + 2 + 1);  // channel 1, second of 2 tokens, high byte
  EXPECT_EQ(CodeOffset(SideKind::kV, Find("fp32"), shape, 3, 5), 3 * 128 + 5);
  EXPECT_EQ(CodeOffset(SideKind::kV, Find("int4"), shape, 6, 2), 64 + 8 + 2);
  EXPECT_EQ(CodeOffset(SideKind::kK, Find("int5_g32"), shape, 18, 17), 16 * 20 + 4 * 64 + 2 * 4 + 1);  // high plane
  EXPECT_EQ(CodeOffset(SideKind::kV, Find("int3_g32"), shape, 7, 9), 4 * 12 + 9 * 4 + 3);
}

std::vector<CellShape> LayoutShapes(const Format& format) {
  std::vector<CellShape> shapes;
  for (const CellShape shape :
       {CellShape{16, 32}, CellShape{32, 96}, CellShape{64, 64}, CellShape{128, 64}, CellShape{128, 80}}) {
    if (Takes(format, shape)) shapes.push_back(shape);
  }
  EXPECT_GE(shapes.size(), 2U) << format.name;
  return shapes;
}

TEST(CellLayout, CodesArePermutedOneToOne) {
  for (const NamedSide& side : EverySide()) {
    for (const CellShape shape : LayoutShapes(*side.format)) {
      const CellSections sections = PlanCell(*side.format, shape);
      std::vector<bool> hit(static_cast<size_t>(sections.block_scales), false);
      for (int token = 0; token < shape.tokens; ++token) {
        for (int64_t byte = 0; byte < sections.row_bytes; ++byte) {
          const int64_t offset = CodeOffset(side.kind, *side.format, shape, token, byte);
          ASSERT_GE(offset, 0);
          ASSERT_LT(offset, sections.block_scales);
          ASSERT_FALSE(hit[static_cast<size_t>(offset)]) << side.text << " " << token << " " << byte;
          hit[static_cast<size_t>(offset)] = true;
        }
      }
    }
  }
}

TEST(CellLayout, ConversionsAreInverseAndFollowTheDrawing) {
  for (const NamedSide& side : EverySide()) {
    for (const CellShape shape : LayoutShapes(*side.format)) {
      const CellSections sections = PlanCell(*side.format, shape);
      const auto canonical = RandomBytes(sections.bytes, 7);
      std::vector<uint8_t> cell(canonical.size());
      FromCanonical(side.kind, *side.format, shape, sections, canonical.data(), cell.data());
      std::vector<uint8_t> back(canonical.size());
      ToCanonical(side.kind, *side.format, shape, sections, cell.data(), back.data());
      EXPECT_EQ(back, canonical) << side.text;
      for (int token = 0; token < shape.tokens; ++token) {
        for (int64_t byte = 0; byte < sections.row_bytes; ++byte) {
          ASSERT_EQ(cell[static_cast<size_t>(CodeOffset(side.kind, *side.format, shape, token, byte))],
                    canonical[static_cast<size_t>(token * sections.row_bytes + byte)]);
        }
      }
      // Scales and offsets of blocks: [t][b] -> [b][t].
      const auto transposed = [&](int64_t section, int bytes) {
        for (int64_t i = 0; i < int64_t{shape.tokens} * sections.blocks * bytes; ++i) {
          const int64_t token = i / bytes / sections.blocks;
          const int64_t block = i / bytes % sections.blocks;
          ASSERT_EQ(cell[static_cast<size_t>(section + (block * shape.tokens + token) * bytes + i % bytes)],
                    canonical[static_cast<size_t>(section + i)])
              << side.text;
        }
      };
      transposed(sections.block_scales, Bytes(side.format->scaling.block));
      if (side.format->scaling.block_offset) transposed(sections.block_offsets, 2);
      const auto rest = static_cast<std::ptrdiff_t>(sections.token_scales);  // tokens and channels: unchanged
      EXPECT_TRUE(std::equal(cell.begin() + rest, cell.end(), canonical.begin() + rest)) << side.text;
    }
  }
}

CacheLayout Plan(const std::vector<std::string>& schemes, LayerShape shape, int page_size) {
  std::vector<KvScheme> parsed;
  for (const std::string& text : schemes) parsed.push_back(KvScheme::Parse(text));
  return PlanCache(parsed, std::vector<LayerShape>(parsed.size(), shape), page_size);
}

void ExpectTiledRecords(int head_dim) {
  const CacheLayout layout =
      Plan({"bf16", "k=int8,v=int4", "int4+exact=none+outliers=6", "int4+outliers=2", "fp8", "turboquant_k3v4_nc"},
           {3, head_dim}, 64);
  std::vector<int> covered(static_cast<size_t>(layout.page_bytes), 0);
  std::vector<int> exact_covered(static_cast<size_t>(layout.exact_page_bytes), 0);
  const auto cover = [](std::vector<int>& bytes, int64_t begin, int64_t n) {
    for (int64_t i = begin; i < begin + n; ++i) ++bytes[static_cast<size_t>(i)];
  };
  for (const LayerScheme& layer : layout.layers) {
    for (int head = 0; head < layer.kv_heads; ++head) {
      cover(covered, layer.KCell(head), layer.k.sections.bytes);
      cover(covered, layer.KUnquantized(head), layer.UnquantizedBytes());
      cover(covered, layer.VCell(head), layer.v.sections.bytes);
      if (!layer.exact_open) continue;
      cover(exact_covered, layer.ExactKCell(head), LayerScheme::ExactCellBytes(layer.k));
      cover(exact_covered, layer.ExactKUnquantized(head), layer.UnquantizedBytes());
      cover(exact_covered, layer.ExactVCell(head), LayerScheme::ExactCellBytes(layer.v));
    }
  }
  EXPECT_THAT(covered, testing::Each(1));
  EXPECT_THAT(exact_covered, testing::Each(1));
  // Two layers keep exact pages: K in int8 and V in int4, and both in int4.
  const int padded = (head_dim + 31) / 32 * 32;
  EXPECT_EQ(layout.exact_page_bytes, 3 * 64 * 2 * (head_dim + padded + 2 * padded + 2));
}

TEST(PlanCache, CellsTileTheRecordsWithoutGapOrOverlap) {
  ExpectTiledRecords(64);
  ExpectTiledRecords(40);
}

TEST(PlanCache, RowsArePaddedToWholeBlocks) {
  const auto sides = [](const char* scheme, int head_dim) {
    const LayerScheme layer = Plan({scheme}, {1, head_dim}, 64).layers[0];
    return std::vector<int>{layer.k.shape.head_dim, layer.k.unused_channels, layer.v.shape.head_dim,
                            layer.v.unused_channels};
  };
  using Sides = std::vector<int>;
  EXPECT_EQ(sides("int4", 80), (Sides{96, 0, 96, 0})) << "the transform fills the padding";
  EXPECT_EQ(sides("int4-hadamard", 80), (Sides{96, 16, 96, 16}));
  EXPECT_EQ(sides("int4+query", 80), (Sides{96, 16, 96, 0})) << "the matrices do not";
  EXPECT_EQ(sides("k=int8,v=int4", 80), (Sides{80, 0, 96, 0}));
  EXPECT_EQ(sides("kivi4", 72), (Sides{72, 0, 96, 24}));
  EXPECT_EQ(sides("nvfp4", 40), (Sides{48, 8, 48, 8}));
  EXPECT_EQ(sides("t2", 40), (Sides{48, 0, 48, 0})) << "a unit of codes";
  EXPECT_EQ(sides("int4", 96), (Sides{96, 0, 96, 0}));
  EXPECT_EQ(Plan({"int4"}, {3, 80}, 64).page_bytes, Plan({"int4"}, {3, 96}, 64).page_bytes);
  const LayerScheme latents = Plan({"mla_fp8"}, {1, 192, 64}, 64).layers[0];
  EXPECT_EQ(latents.k.shape.head_dim, 256);
  EXPECT_EQ(latents.HeadBytes(), 64 * (256 + 2 * 4 + 128));
  for (const Format& format : All()) {
    if (format.latents == MlaSupport::kRequired) continue;
    for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
      const LayerScheme layer = Plan({std::string(format.name)}, {1, head_dim}, 64).layers[0];
      for (const Side* side : {&layer.k, &layer.v}) {
        EXPECT_TRUE(Takes(*side->format, side->shape)) << format.name << " " << head_dim;
        EXPECT_EQ(side->shape.head_dim == head_dim, Takes(*side->format, {64, head_dim})) << format.name;
        EXPECT_LT(side->shape.head_dim, head_dim + 32) << format.name << " " << head_dim;
      }
    }
  }
}

std::string Refused(const std::string& scheme, LayerShape shape) {
  try {
    Plan({scheme}, shape, 64);
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(PlanCache, LatentsAreStoredOnce) {
  const CacheLayout layout = Plan({"bf16", "fp32"}, {1, 512, 64}, 64);
  EXPECT_EQ(layout.page_bytes, 64 * 576 * (2 + 4));
  for (const LayerScheme& layer : layout.layers) {
    const int bytes = layer.k.format->code_bits / 8;
    EXPECT_EQ(layer.VCell(0), layer.KCell(0));
    EXPECT_EQ(layer.KUnquantized(0), layer.KCell(0) + 64 * 512 * bytes);
    EXPECT_EQ(layer.UnquantizedBytes(), 64 * 64 * bytes);
  }
  EXPECT_EQ(Plan({"mla_fp8"}, {1, 512, 64}, 64).page_bytes, 64 * 656);
  EXPECT_EQ(Plan({"mla_fp8"}, {1, 64, 16}, 64).page_bytes, 64 * (64 + 4 + 32)) << "one scale for a short row";
  const CacheLayout exact = Plan({"mla_int4"}, {1, 512, 64}, 64);
  EXPECT_EQ(exact.page_bytes, 64 * (256 + 32 + 128));
  EXPECT_EQ(exact.exact_page_bytes, 64 * 576 * 2);
  EXPECT_EQ(exact.layers[0].ExactVCell(0), exact.layers[0].ExactKCell(0));
  EXPECT_NE(Plan({"bf16"}, {1, 64, 16}, 64).Identity(), Plan({"bf16"}, {1, 64}, 64).Identity());
}

TEST(PlanCache, RefusesWhatLatentsCannotTake) {
  EXPECT_THAT(Refused("int8", {1, 512, 64}),
              testing::HasSubstr("scheme int8: this model's layers store K and V as one latent (MLA); formats for it: "
                                 "fp32, bf16, fp16, mla_fp8, mla_fp8_e5m2, mla_int8, mla_int4, mla_nvfp4"));
  EXPECT_THAT(Refused("mla_fp8", {3, 64}),
              testing::HasSubstr("mla_fp8 stores the latents of MLA, but this model's "
                                 "layers have K and V apart; formats for them: fp32, bf16"));
  EXPECT_THAT(Refused("mla_int4+hadamard", {1, 512, 64}), testing::HasSubstr("stored as they are"));
  EXPECT_THAT(Refused("k=bf16,v=fp16", {1, 512, 64}), testing::HasSubstr("as one latent"));
  EXPECT_THAT(Refused("bf16+hadamard", {1, 512, 64}), testing::HasSubstr("stored as they are"));
  EXPECT_THAT(Refused("bf16+exact=open", {1, 512, 64}), testing::HasSubstr("exact without exact pages"));
  EXPECT_THAT(Refused("bf16", {2, 512, 64}), testing::HasSubstr("2 latents of rank 512"));
  EXPECT_THAT(Refused("bf16", {1, 520, 64}), testing::HasSubstr("rank up to 512"));
  EXPECT_THAT(Refused("bf16", {1, 512, 63}), testing::HasSubstr("an even number of channels up to 256"));
}

TEST(PlanCache, IdentityTellsApartWhatChangesBytes) {
  std::set<std::string> identities;
  for (const char* scheme :
       {"int4", "int4-hadamard", "int4+mean", "int4+exact=none", "int4+outliers=2", "int8", "k=int8,v=int4"}) {
    for (const LayerShape shape : {LayerShape{3, 64}, LayerShape{6, 32}, LayerShape{3, 32}}) {
      for (const int page_size : {32, 64}) identities.insert(Plan({scheme, scheme}, shape, page_size).Identity());
    }
  }
  EXPECT_EQ(identities.size(), 7U * 3U * 2U);
  EXPECT_NE(Plan({"int4", "int8"}, {3, 64}, 64).Identity(), Plan({"int8", "int4"}, {3, 64}, 64).Identity());
  EXPECT_EQ(Plan({"int4"}, {3, 64}, 64).Identity(), "kvanta-cells-1;page=64;layers 0-0: int4 kv_heads=3 head_dim=64");
  EXPECT_EQ(Plan({"k=int8,v=int4"}, {3, 80}, 64).Identity(),
            "kvanta-cells-1;page=64;layers 0-0: k=int8,v=int4 kv_heads=3 head_dim=80 v_cells=96");
}

TEST(PlanCache, RefusesWhatALayerCannotTake) {
  EXPECT_THROW(Plan({"int4"}, {3, 12}, 64), InputError);
  EXPECT_THROW(Plan({"int8"}, {0, 64}, 64), InputError);
  EXPECT_THROW(Plan({"int8"}, {3, 64}, 63), InputError);
  EXPECT_THROW(Plan({}, {3, 64}, 64), InputError);
  KvScheme scheme = KvScheme::Parse("int8");
  scheme.v.mean = true;
  EXPECT_THROW(PlanCache({scheme}, {{3, 64}}, 64), InputError);
  scheme.v.mean = false;
  for (const int outliers : {-2, 3, 66}) {
    scheme.k.outliers = outliers;
    EXPECT_THROW(PlanCache({scheme}, {{3, 64}}, 64), InputError) << outliers;
  }
  scheme.k.outliers = 10;
  EXPECT_THROW(PlanCache({scheme}, {{3, 8}}, 64), InputError);
  EXPECT_NO_THROW(PlanCache({scheme}, {{3, 64}}, 64));
  scheme.k.outliers = 0;
  scheme.sink_pages = 1;
  EXPECT_THROW(PlanCache({scheme}, {{3, 64}}, 64), InputError);
  EXPECT_THROW(Plan({"kivi4"}, {3, 64}, 16), InputError);
}

TEST(PlanCache, TokenGroupsNeedExactOpenPages) {
  for (const char* text : {"kivi4+exact=none", "k=kivi4,v=int8+exact=none"}) {
    try {
      Plan({text}, {3, 64}, 64);
      ADD_FAILURE() << text;
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr(text), HasSubstr("kivi4 encodes keys when their page closes"),
                                      HasSubstr("exact=open")));
    }
  }
  EXPECT_EQ(Plan({"k=int8,v=kivi4+exact=none"}, {3, 64}, 64).exact_page_bytes, 0);  // V has no token groups
}

TEST(PlanCache, ANameIsAnotherFormatOnEitherSide) {
  const CacheLayout layout = Plan({"kivi4", "turboquant_k8v4", "k=int8,v=kivi2"}, {2, 64}, 32);
  EXPECT_EQ(layout.layers[0].k.format->scaling.token_group, 32);
  EXPECT_TRUE(layout.layers[0].v.format->scaling.block_offset);
  EXPECT_EQ(layout.layers[1].k.format->code, ElementType::kE4M3);
  EXPECT_EQ(layout.layers[1].v.format->code, ElementType::kUint4);
  EXPECT_EQ(layout.layers[2].v.format->code, ElementType::kUint2);
  EXPECT_EQ(layout.layers[2].v.sections.channel_scales, layout.layers[2].v.sections.bytes);
}

TEST(PageRecord, CanonicalAndBack) {
  const CacheLayout layout =
      Plan({"bf16", "k=int8,v=int4", "int4+outliers=4", "kivi2", "turboquant_3bit_nc", "k=mxfp4,v=nvfp4"}, {2, 96}, 32);
  for (const RecordKind kind : {RecordKind::kQuantized, RecordKind::kExact}) {
    const auto record = RandomBytes(RecordBytes(layout, 0, kind), 3);
    const auto canonical = RecordToCanonical(layout, 0, kind, record);
    EXPECT_NE(canonical, record);
    EXPECT_EQ(RecordFromCanonical(layout, 0, kind, canonical), record);
  }
  EXPECT_THROW(RecordToCanonical(layout, 0, RecordKind::kExact, RandomBytes(16, 1)), InputError);
}

}  // namespace
}  // namespace kvanta::formats
