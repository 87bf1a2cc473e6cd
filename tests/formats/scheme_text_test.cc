// Names, the explicit syntax, modifiers, per-layer overrides; every message names the value and the alternatives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/expected_formats.h"
#include "formats/format.h"
#include "formats/names.h"
#include "kvanta/error.h"
#include "kvanta/kv_scheme.h"

namespace kvanta {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// The message of the InputError that parsing `text` throws; "" if it throws none.
std::string Refusal(std::string_view text) {
  try {
    KvScheme::Parse(text);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

std::string LayersRefusal(std::string_view text) {
  try {
    ParseLayerSchemes(KvScheme::Parse("bf16"), text, 6);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(SchemeText, PresetsHaveTheDefaultsOfTheirFormat) {
  const KvScheme int4 = KvScheme::Parse("int4");
  EXPECT_EQ(int4.k, (KvSide{.format = "int4", .hadamard = true, .mean = false}));
  EXPECT_EQ(int4.v, int4.k);
  EXPECT_EQ(int4.exact, ExactPages::kOpen);
  EXPECT_EQ(int4.sink_pages, 1);
  const KvScheme fp8 = KvScheme::Parse(" fp8 ");
  EXPECT_EQ(fp8.k, (KvSide{.format = "fp8_e4m3", .hadamard = false, .mean = false}));
  EXPECT_EQ(fp8.exact, ExactPages::kNone);
  EXPECT_EQ(fp8.sink_pages, 0);
}

TEST(SchemeText, DefaultsOfEveryName) {
  std::vector<std::string> names;
  for (const formats::ExpectedFormat& preset : formats::kExpectedFormats) {
    names.emplace_back(preset.name);
    const KvScheme scheme = KvScheme::Parse(preset.name);
    const bool query = std::string_view(preset.name).starts_with("klt");
    const KvSide k{.format = preset.name, .hadamard = preset.k_hadamard, .mean = false, .query = query};
    EXPECT_EQ(scheme.k, k) << preset.name;
    EXPECT_EQ(scheme.v, (KvSide{.format = preset.name, .hadamard = preset.v_hadamard, .mean = false})) << preset.name;
    EXPECT_EQ(scheme.exact, preset.open ? ExactPages::kOpen : ExactPages::kNone) << preset.name;
    EXPECT_EQ(scheme.sink_pages, preset.sink) << preset.name;
    EXPECT_EQ(scheme.ToString(), preset.name);
    // One modifier for both sides, and the same side by side.
    for (const bool hadamard : {false, true}) {
      const std::string modifier = hadamard ? "+hadamard" : "-hadamard";
      const KvScheme other = KvScheme::Parse(preset.name + modifier);
      EXPECT_EQ(other.k.hadamard, hadamard) << preset.name;
      EXPECT_EQ(other.v.hadamard, hadamard) << preset.name;
      const std::string sides = std::string("k=") + preset.name + modifier + ",v=" + preset.name + modifier;
      EXPECT_EQ(KvScheme::Parse(sides), other) << sides;
    }
  }
  EXPECT_EQ(FormatNames(), names);
}

TEST(SchemeText, AliasesAndNamesOfOtherEngines) {
  const std::vector<std::pair<const char*, const char*>> names = {{"bfloat16", "bf16"},
                                                                  {"float16", "fp16"},
                                                                  {"f16", "fp16"},
                                                                  {"half", "fp16"},
                                                                  {"fp8", "fp8_e4m3"},
                                                                  {"float32", "fp32"},
                                                                  {"f32", "fp32"},
                                                                  {"int8_per_token_head", "int8"},
                                                                  {"int4_g32", "int4"},
                                                                  {"4", "int4"},
                                                                  {"8", "int8"},
                                                                  {"16", "fp8_e4m3"},
                                                                  {"17", "fp8_e5m2"},
                                                                  {"fp8_inc", "fp8_e4m3"},
                                                                  {"float8_e4m3fn", "fp8_e4m3"},
                                                                  {"e5m2", "fp8_e5m2"},
                                                                  {"nvfp4_ds_mla", "mla_nvfp4"},
                                                                  {"fp8_k_nvfp4_v", "k=fp8_e4m3,v=nvfp4"},
                                                                  {"ultraquant_4bit", "k=mxfp4+hadamard,v=mxfp4"},
                                                                  {"fp8_e5m2", "fp8_e5m2"},
                                                                  {"fp4_mx_block16", "fp4_e2m1"}};
  for (const auto& [typed, meant] : names) {
    EXPECT_EQ(KvScheme::Parse(typed).ToString(), meant) << typed;
  }
  EXPECT_EQ(KvScheme::Parse("k=8,v=4").ToString(), "k=int8,v=int4");
}

TEST(SchemeText, ExplicitSides) {
  const KvScheme scheme = KvScheme::Parse("k=int8,v=int4");
  EXPECT_EQ(scheme.k.format, "int8");
  EXPECT_EQ(scheme.v.format, "int4");
  EXPECT_EQ(scheme.exact, ExactPages::kOpen);  // the default of the side that needs more
  EXPECT_EQ(scheme.sink_pages, 1);
  const KvScheme none = KvScheme::Parse("v=int4+exact=none,k=int8-hadamard+mean");
  EXPECT_EQ(none.k, (KvSide{.format = "int8", .hadamard = false, .mean = true}));
  EXPECT_EQ(none.v.hadamard, true);
  EXPECT_EQ(none.exact, ExactPages::kNone);
  EXPECT_EQ(none.sink_pages, 0);
  EXPECT_EQ(KvScheme::Parse("k=int4,v=int4"), KvScheme::Parse("int4"));
}

TEST(SchemeText, ModifiersOfAPresetApplyToBothSidesMeanAndOutliersToKeysOnly) {
  const KvScheme scheme = KvScheme::Parse("int4-hadamard+mean+outliers=4+sink=0");
  EXPECT_FALSE(scheme.k.hadamard);
  EXPECT_FALSE(scheme.v.hadamard);
  EXPECT_TRUE(scheme.k.mean);
  EXPECT_FALSE(scheme.v.mean);
  EXPECT_EQ(scheme.k.outliers, 4);
  EXPECT_EQ(scheme.v.outliers, 0);
  EXPECT_EQ(scheme.sink_pages, 0);
  EXPECT_EQ(KvScheme::Parse("int8+exact=open").exact, ExactPages::kOpen);
  EXPECT_EQ(KvScheme::Parse("int8+exact=open+sink=1").sink_pages, 1);
}

TEST(SchemeText, QueryIsOfKeysAndKeepsTheFirstPage) {
  const KvScheme scheme = KvScheme::Parse("int4+query");
  EXPECT_TRUE(scheme.k.query && scheme.k.hadamard);
  EXPECT_FALSE(scheme.v.query);
  EXPECT_EQ(scheme.ToString(), "int4+query");
  EXPECT_EQ(KvScheme::Parse("int4-query"), KvScheme::Parse("int4"));
  const KvScheme apart = KvScheme::Parse("k=int5_g32+query,v=int8");  // neither keeps its first page by default
  EXPECT_EQ(apart.sink_pages, 1);
  EXPECT_EQ(apart.ToString(), "k=int5_g32+query,v=int8");
  EXPECT_EQ(KvScheme::Parse("int4+query+sink=0").ToString(), "int4+query+sink=0");  // refused by the layout
  EXPECT_THAT(Refusal("k=int4,v=int4+query"), HasSubstr("only K takes +query"));
  EXPECT_THAT(Refusal("int4+query+query"), HasSubstr("query is given twice"));
}

// Every scheme that can be written: all pairs of formats, all modifiers.
TEST(SchemeText, ParseUndoesToStringForEveryScheme) {
  int schemes = 0;
  for (const std::string& k : FormatNames()) {
    for (const std::string& v : FormatNames()) {
      for (int bits = 0; bits < 64; ++bits) {
        const bool open = (bits & 8) != 0;
        const KvScheme scheme{.k = {.format = k,
                                    .hadamard = (bits & 1) != 0,
                                    .mean = (bits & 2) != 0,
                                    .query = (bits & 32) != 0,
                                    .outliers = bits & 2},
                              .v = {.format = v, .hadamard = (bits & 4) != 0},
                              .exact = open ? ExactPages::kOpen : ExactPages::kNone,
                              .sink_pages = open && (bits & 16) != 0 ? 1 : 0};
        const std::string text = scheme.ToString();
        EXPECT_EQ(KvScheme::Parse(text), scheme) << text;
        EXPECT_EQ(KvScheme::Parse(text).ToString(), text);
        ++schemes;
      }
    }
  }
  const auto names = std::ssize(formats::kExpectedFormats);
  EXPECT_EQ(schemes, 64 * names * names);
}

TEST(SchemeText, CanonicalTextIsShort) {
  EXPECT_EQ(KvScheme::Parse("k=int4_g32+hadamard,v=int4+exact=open+sink=1").ToString(), "int4");
  EXPECT_EQ(KvScheme::Parse("k=int4-hadamard,v=int4-hadamard").ToString(), "int4-hadamard");
  EXPECT_EQ(KvScheme::Parse("k=int4-hadamard,v=int4").ToString(), "k=int4-hadamard,v=int4");
  EXPECT_EQ(KvScheme::Parse("k=int8,v=int4+exact=none").ToString(), "k=int8,v=int4+exact=none");
  EXPECT_EQ(KvScheme::Parse("int4+exact=none").ToString(), "int4+exact=none");
  // With different defaults of the sides, one modifier may be half a default.
  EXPECT_EQ(KvScheme::Parse("turboquant_4bit_nc-hadamard").ToString(), "turboquant_4bit_nc-hadamard");
  EXPECT_EQ(KvScheme::Parse("turboquant_4bit_nc+hadamard").ToString(),
            "k=turboquant_4bit_nc,v=turboquant_4bit_nc+hadamard");
  EXPECT_EQ(KvScheme::Parse("k=int5_g32+mean,v=int4").ToString(), "k=int5_g32+mean,v=int4");
  EXPECT_EQ(KvScheme::Parse("k=int6_g32,v=int5_g32").sink_pages, 0);
  EXPECT_EQ(KvScheme::Parse("k=kivi4,v=fp8").exact, ExactPages::kOpen);
}

TEST(SchemeText, UnknownNamesListTheKnownAndSuggestTheNearest) {
  EXPECT_THAT(Refusal("int9"), AllOf(HasSubstr("'int9'"), HasSubstr("did you mean 'int8'"), HasSubstr("fp8_e4m3")));
  EXPECT_THAT(Refusal("fp8_e4m3fn"), HasSubstr("did you mean 'fp8_e4m3'"));
  EXPECT_THAT(Refusal("zzzzzz"), AllOf(HasSubstr("available: auto, fp32, bf16"), Not(HasSubstr("did you mean"))));
  EXPECT_THAT(Refusal("foo"), Not(HasSubstr("did you mean")));
  EXPECT_THAT(Refusal("INT4"), HasSubstr("did you mean 'int4'"));
  EXPECT_THAT(Refusal("int2"), HasSubstr("did you mean 'int2_g32'")) << "not int8, as near as it may be";
  EXPECT_THAT(Refusal("k=Int6,v=int4"), HasSubstr("did you mean 'int6_g32'"));
  EXPECT_THAT(Refusal("8,8"), HasSubstr("named apart as in k=int8,v=int4")) << "ExLlamaV3's bits of K and V";
  EXPECT_THAT(Refusal("turboquant_4bit"), HasSubstr("did you mean 'turboquant_4bit_nc'"));
  EXPECT_THAT(Refusal(""), HasSubstr("available"));
  EXPECT_THAT(Refusal(std::string(10000, 'x')).size(), testing::Lt(600U));
  EXPECT_THAT(Refusal("int8\nint4"), Not(HasSubstr("\n")));
}

TEST(SchemeText, FormatsOfOtherVersionsAndEnginesAreRefusedWithTheReason) {
  for (const formats::CompatName& foreign : formats::CompatNames()) {
    EXPECT_NE(foreign.format.empty(), foreign.reason.empty()) << foreign.name;
    EXPECT_EQ(formats::FindOrNull(foreign.name), nullptr) << foreign.name << " is a format now: remove its entry";
    if (foreign.reason.empty()) continue;
    EXPECT_THAT(Refusal(foreign.name), AllOf(HasSubstr(std::string(foreign.reason)), HasSubstr("available: auto")));
    EXPECT_THAT(Refusal("k=int8,v=" + std::string(foreign.name)), HasSubstr(std::string(foreign.reason)));
  }
  EXPECT_EQ(KvScheme::Parse("fp8_ds_mla"), KvScheme::Parse("mla_fp8"));
  for (const char* scheme : {"auto", "k=auto,v=int4", "auto+exact=open"}) {
    EXPECT_THAT(Refusal(scheme),
                AllOf(HasSubstr("resolved by the engine; name a format here: fp32, bf16"), Not(HasSubstr("auto, "))))
        << "it is no alternative to itself";
  }
}

TEST(SchemeText, OfLatentsANameStandsForTheirFormOfItsCode) {
  const std::pair<const char*, const char*> names[] = {
      {"fp8", "mla_fp8"},           {"fp8_e4m3", "mla_fp8"},   {"fp8_ds_mla", "mla_fp8"}, {"fp8_e5m2", "mla_fp8_e5m2"},
      {"int8", "mla_int8"},         {"8", "mla_int8"},         {"int4", "mla_int4"},      {"int4_g32", "mla_int4"},
      {"nvfp4", "mla_nvfp4"},       {"fp4_e2m1", "mla_nvfp4"}, {"bf16", "bf16"},          {"mla_int4", "mla_int4"},
      {"k=int4,v=int4", "mla_int4"}};
  for (const auto& [typed, meant] : names) EXPECT_EQ(KvScheme::Parse(typed, true), KvScheme::Parse(meant)) << typed;
  EXPECT_EQ(KvScheme::Parse("int4+sink=0+exact=2", true), KvScheme::Parse("mla_int4+sink=0+exact=2"));
  EXPECT_EQ(KvScheme::Parse("kivi4", true), KvScheme::Parse("kivi4")) << "refused with a layer's shape";
  EXPECT_EQ(KvScheme::Parse("turboquant_k8v4", true), KvScheme::Parse("turboquant_k8v4"));
  const std::vector<KvScheme> layers = ParseLayerSchemes(KvScheme::Parse("int8", true), "0=int4;-1=bf16", 3, {}, true);
  EXPECT_EQ(layers, (std::vector{KvScheme::Parse("mla_int4"), KvScheme::Parse("mla_int8"), KvScheme::Parse("bf16")}));
}

// A format that a name stands for takes latents, and its codes are the name's or of the name's type.
TEST(SchemeText, LatentFormatsTakeLatents) {
  for (const formats::Format& format : formats::All()) {
    if (format.latent_format.empty()) continue;
    const formats::Format& latents = formats::Find(format.latent_format);
    EXPECT_EQ(latents.latents, formats::MlaSupport::kRequired) << format.name;
    EXPECT_EQ(latents.code, format.code) << format.name;
  }
}

TEST(SchemeText, BadSyntaxIsRefused) {
  EXPECT_THAT(Refusal("k=int8"), AllOf(HasSubstr("side v is missing"), HasSubstr("k=int8,v=int4")));
  EXPECT_THAT(Refusal("v=int8"), HasSubstr("side k is missing"));
  EXPECT_THAT(Refusal("k=int8,k=int4"), HasSubstr("twice"));
  EXPECT_THAT(Refusal("k=int8,v=int4,"), HasSubstr("side '' is neither k nor v"));
  EXPECT_THAT(Refusal("k=int8,w=int4"), HasSubstr("'w' is neither k nor v"));
  EXPECT_THAT(Refusal("k=int8,v="), HasSubstr("available"));
  EXPECT_THAT(Refusal("int8,int4"), HasSubstr("named apart"));
  EXPECT_THAT(Refusal("int4+exact=open+exact=none"), HasSubstr("exact is given twice"));
  EXPECT_THAT(Refusal("k=int4+sink=1,v=int4+sink=1"), HasSubstr("sink is given twice"));
  EXPECT_THAT(Refusal("int4+hadamard-hadamard"), HasSubstr("hadamard is given twice"));
  EXPECT_THAT(Refusal("int4+sink=65"), AllOf(HasSubstr("+sink=65"), HasSubstr("0 to 64")));
  EXPECT_THAT(Refusal("int4+sink=-1"), HasSubstr("sink="));
  EXPECT_THAT(Refusal("int4+sink=x"), HasSubstr("0 to 64"));
  EXPECT_THAT(Refusal("int4+exact=3"), HasSubstr("+exact=2"));
  EXPECT_THAT(Refusal("int4+edges=99999"), HasSubstr("0 to 1024"));
  EXPECT_THAT(Refusal("int4+outlier=4"), HasSubstr("modifiers are +hadamard"));
  EXPECT_THAT(Refusal("int4+outliers=3"), HasSubstr("must be even"));
  EXPECT_THAT(Refusal("int4+outliers=66"), HasSubstr("0 to 64"));
  EXPECT_THAT(Refusal("int4+outliers=2+outliers=2"), HasSubstr("outliers is given twice"));
  EXPECT_THAT(Refusal("k=int4,v=int4+outliers=2"), HasSubstr("only K"));
  EXPECT_THAT(Refusal("int4-exact=open"), HasSubstr("unknown modifier '-exact=open'"));
  EXPECT_THAT(Refusal("int4+"), HasSubstr("unknown modifier '+'"));
  EXPECT_THAT(Refusal("k=int4,v=int4+mean"), HasSubstr("only K"));
  EXPECT_THAT(Refusal("int8+sink=1"), HasSubstr("needs exact=open"));
  EXPECT_THAT(Refusal("int4+exact=none+sink=1"), HasSubstr("needs exact=open"));
}

TEST(SchemeText, ExactPagesSinksAndEdges) {
  const KvScheme two = KvScheme::Parse("int4+exact=2+sink=3");
  EXPECT_EQ(two.exact, ExactPages::kTwo);
  EXPECT_EQ(two.sink_pages, 3);
  EXPECT_EQ(two.ToString(), "int4+exact=2+sink=3");
  EXPECT_EQ(KvScheme::Parse("int8+exact=2").ToString(), "int8+exact=2");
  EXPECT_EQ(KvScheme::Parse("int4+edges=1").boundary_layers, 1);
  EXPECT_EQ(KvScheme::Parse("turboquant_4bit_nc").boundary_layers, 2) << "vLLM's preset";
  EXPECT_EQ(KvScheme::Parse("turboquant_4bit_nc+edges=0").ToString(), "turboquant_4bit_nc+edges=0");
  EXPECT_EQ(KvScheme::Parse("k=turboquant_4bit_nc,v=int4").boundary_layers, 0) << "no preset";
}

TEST(LayerText, EdgesStayUnlessTheyAreNamed) {
  std::vector<std::string> texts;
  for (const KvScheme& scheme : ParseLayerSchemes(KvScheme::Parse("int8+edges=2"), "1=int4", 6)) {
    texts.push_back(scheme.ToString());
  }
  EXPECT_THAT(texts, testing::ElementsAre("bf16", "int4", "int8", "int8", "bf16", "bf16"));
  EXPECT_EQ(ParseLayerSchemes(KvScheme::Parse("int8+edges=9"), "", 3)[1].ToString(), "bf16");
}

TEST(LayerText, IndicesRangesAndNegatives) {
  const KvScheme base = KvScheme::Parse("int4");
  const auto schemes = ParseLayerSchemes(base, "0, 1,-1=bf16;2-3=k=int8,v=int4+exact=none", 6);
  std::vector<std::string> texts;
  for (const KvScheme& scheme : schemes) texts.push_back(scheme.ToString());
  EXPECT_THAT(texts, testing::ElementsAre("bf16", "bf16", "k=int8,v=int4+exact=none", "k=int8,v=int4+exact=none",
                                          "int4", "bf16"));
  EXPECT_THAT(ParseLayerSchemes(base, "", 3), testing::ElementsAre(base, base, base));
  EXPECT_EQ(ParseLayerSchemes(base, "-3--1=bf16", 4)[1].ToString(), "bf16");
  EXPECT_EQ(ParseLayerSchemes(base, "0=bf16;", 2)[0].ToString(), "bf16");
}

TEST(LayerText, BadTextIsRefused) {
  EXPECT_THAT(LayersRefusal("6=int8"), AllOf(HasSubstr("layer 6 is out of range"), HasSubstr("0 to 5")));
  EXPECT_THAT(LayersRefusal("-7=int8"), HasSubstr("out of range"));
  EXPECT_THAT(LayersRefusal("0,1=int8;1=int4"), HasSubstr("layer 1 is named twice"));
  EXPECT_THAT(LayersRefusal("3-2=int8"), HasSubstr("empty"));
  EXPECT_THAT(LayersRefusal("0"), HasSubstr("no '='"));
  EXPECT_THAT(LayersRefusal("=int8"), HasSubstr("expected a layer number"));
  EXPECT_THAT(LayersRefusal("0,=int8"), HasSubstr("expected a layer number"));
  EXPECT_THAT(LayersRefusal("0x=int8"), HasSubstr("expected"));
  EXPECT_THAT(LayersRefusal("99999999999=int8"), HasSubstr("expected a layer number"));
  EXPECT_THAT(LayersRefusal("0=int9"), HasSubstr("int8"));
}

}  // namespace
}  // namespace kvanta
