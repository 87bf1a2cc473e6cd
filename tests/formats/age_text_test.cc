// The text of precision by age, and layouts with later levels.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/page_header.h"
#include "formats/scheme.h"
#include "kvanta/error.h"

namespace kvanta {
namespace {

using testing::HasSubstr;

template <class F>
std::string MessageOf(F call) {
  try {
    call();
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(AgeText, IsAListOfSchemes) {
  const KvScheme scheme = KvScheme::Parse(" 0=int8,8192=k=int4,v=t3+sink=2, 32768=t2 ");
  EXPECT_EQ(scheme.k.format, "int8");
  EXPECT_EQ(scheme.exact, ExactPages::kNone);
  ASSERT_EQ(scheme.ages.size(), 2U);
  EXPECT_EQ(scheme.ages[0].tokens, 8192);
  EXPECT_EQ(scheme.ages[0].k.format, "int4");
  EXPECT_EQ(scheme.ages[0].v.format, "t3");
  EXPECT_EQ(scheme.ages[0].sink_pages, 2);
  EXPECT_EQ(scheme.ages[1].tokens, 32768);
  EXPECT_EQ(scheme.ages[1].sink_pages, 1) << "the default of t2";
  EXPECT_EQ(scheme.ToString(), "0=int8,8192=k=int4,v=t3+sink=2,32768=t2");
}

TEST(AgeText, ComesBack) {
  for (const char* text : {"0=int8,512=t3", "0=int4,64=t3+sink=0", "0=bf16,16=int8-hadamard", "0=fp8+hadamard,64=int4",
                           "0=k=int8+mean+outliers=4,v=int8,64=int5_g32", "0=bf16+edges=2,64=int8-hadamard"}) {
    const KvScheme scheme = KvScheme::Parse(text);
    EXPECT_EQ(KvScheme::Parse(scheme.ToString()), scheme) << text;
  }
  EXPECT_EQ(KvScheme::Parse("0=int8,512=t3").ToString(), "0=int8,512=t3");
}

TEST(AgeText, NamesWhatIsWrong) {
  const auto message = [](std::string_view text) { return MessageOf([&] { KvScheme::Parse(text); }); };
  EXPECT_THAT(message("0=int8"), HasSubstr("there is no age after 0"));
  EXPECT_THAT(message("16=int8,32=t3"), HasSubstr("the first age is 16, must be 0"));
  EXPECT_THAT(message("0=int8,64=int4,64=t3"), HasSubstr("the age 64 must be above 64"));
  EXPECT_THAT(message("0=int8,99999999999999999999=t3"), HasSubstr("an age is at most"));
  EXPECT_THAT(message("0=int8,64=8=t3"), HasSubstr("has two ages"));
  EXPECT_THAT(message("0=int8,64=int9"), HasSubstr("int9"));
  EXPECT_THAT(message("0=int8,64="), HasSubstr("''"));
  EXPECT_THAT(message("0=int8,64=t3,"), HasSubstr("t3,"));
  EXPECT_THAT(message("0=int8,64=int4+exact=2"), HasSubstr("+exact=2 is of the first level alone"));
  EXPECT_THAT(message("0=int8,64=int4+mean"), HasSubstr("+mean, +query and +outliers are of the first level"));
  EXPECT_THAT(message("0=fp8,64=int4"), HasSubstr("say -hadamard in one of them"));
  EXPECT_THAT(message("0=int8,16=int6_g32,32=int4,64=t2"), HasSubstr("at most 3 levels"));
}

formats::CacheLayout Plan(const char* scheme, formats::LayerShape shape = {2, 64}, int page_size = 64) {
  return formats::PlanCache({KvScheme::Parse(scheme, shape.rope_dim != 0)}, {shape}, page_size);
}

TEST(AgedLayout, LaterLevelsHaveRecordsOfTheirOwn) {
  const formats::CacheLayout layout = Plan("0=int8+exact=open+sink=2,128=int4,256=t2");
  const formats::LayerScheme& layer = layout.layers[0];
  ASSERT_EQ(layer.ages.size(), 2U);
  EXPECT_EQ(layer.ages[0].pages, 2);
  EXPECT_EQ(layer.ages[1].pages, 4);
  EXPECT_EQ(layer.ageless_pages, 2);
  EXPECT_EQ(layout.age_bytes[0], Plan("int4").page_bytes);
  EXPECT_EQ(layout.age_bytes[1], Plan("t2").page_bytes);
  EXPECT_EQ(layout.page_bytes, Plan("int8").page_bytes);
  EXPECT_THAT(layout.Identity(), HasSubstr("0=int8+exact=open+sink=2,128=int4,256=t2"));
  const std::string header = formats::PageHeaderToJson({.model = "m", .layout = layout, .scales = {}});
  EXPECT_THAT(header, HasSubstr(R"("ages":[{"tokens":128)"));
  EXPECT_EQ(formats::PageHeaderToJson(formats::PageHeaderFromJson(header)), header);
  EXPECT_EQ(Plan("int8").age_bytes, (std::array<int64_t, 2>{}));
}

TEST(AgedLayout, RefusesWhatLevelsCannotBe) {
  const auto message = [](const char* scheme, formats::LayerShape shape = {2, 64}) {
    return MessageOf([&] { Plan(scheme, shape); });
  };
  EXPECT_THAT(message("0=int8,100=t3"), HasSubstr("the age of 100 tokens must be a multiple of the page size, 64"));
  EXPECT_THAT(message("0=int4+exact=2,64=t3"), HasSubstr("from 128 on"));
  EXPECT_THAT(message("0=int4,64=int8"), HasSubstr("no fewer than the"));
  EXPECT_THAT(message("0=int8,64=int4,128=int5_g32"), HasSubstr("no fewer than the"));
  EXPECT_THAT(message("0=t3,64=t2"), HasSubstr("must not be a trellis"));
  EXPECT_THAT(message("0=int4+query,64=t3"), HasSubstr("+query"));
  EXPECT_THAT(message("0=bf16,64=nvfp4"), HasSubstr("nvfp4 has static scales"));
  EXPECT_THAT(message("0=int8,64=mla_int4-hadamard"), HasSubstr("Hadamard"));
  EXPECT_THAT(message("0=bf16,64=mla_int4"), HasSubstr("stores the latents of MLA"));
  EXPECT_THAT(message("0=bf16,64=mxfp8", {1, 128, 16}), HasSubstr("does not store latents"));
  EXPECT_EQ(message("0=mla_fp8,64=int4", {1, 128, 16}), "");
}

TEST(FloorText, IsParsedAndWritten) {
  for (const char* text :
       {"0=int8,floor=t3", "0=int8,floor=int4,floor=t2+sink=0", "0=k=int8,v=int4,floor=k=int4,v=t3"}) {
    const KvScheme scheme = KvScheme::Parse(text);
    EXPECT_TRUE(scheme.HasFloor());
    EXPECT_EQ(scheme.ToString(), text);
    EXPECT_EQ(KvScheme::Parse(scheme.ToString()), scheme);
  }
  EXPECT_FALSE(KvScheme::Parse("0=int8,64=t3").HasFloor());
  EXPECT_NE(KvScheme::Parse("0=int8,floor=t3"), KvScheme::Parse("0=int8,64=t3"));
}

TEST(FloorText, RefusesWhatFloorsCannotBe) {
  const auto message = [](const char* scheme) { return MessageOf([&] { Plan(scheme); }); };
  EXPECT_THAT(message("0=int8,64=int4,floor=t3"), HasSubstr("ages and a floor do not go together"));
  EXPECT_THAT(message("0=int8,floor=int4,64=t3"), HasSubstr("ages and a floor do not go together"));
  EXPECT_THAT(message("floor=int8,floor=t3"), HasSubstr("the first age is floor, must be 0"));
  EXPECT_THAT(message("0=int8,floor=int4,floor=t3,floor=t2"), HasSubstr("at most 3 levels"));
  EXPECT_THAT(message("0=int4,floor=int8"), HasSubstr("no fewer than the"));
  EXPECT_THAT(message("0=int4,floor=t3,floor=t2"), HasSubstr("both later levels take"));
}

TEST(FloorLayout, IsThatOfAges) {
  const formats::CacheLayout floor = Plan("0=int8,floor=t3"), ages = Plan("0=int8,64=t3");
  EXPECT_EQ(floor.age_bytes, ages.age_bytes);
  EXPECT_EQ(floor.page_bytes, ages.page_bytes);
  EXPECT_NE(floor.Identity(), ages.Identity());
  const std::string header = formats::PageHeaderToJson({.model = "m", .layout = floor, .scales = {}});
  EXPECT_THAT(header, HasSubstr(R"("ages":[{"k":)"));
  EXPECT_EQ(formats::PageHeaderToJson(formats::PageHeaderFromJson(header)), header);
}

}  // namespace
}  // namespace kvanta
