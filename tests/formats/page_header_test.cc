// Headers of pages: what is written is read back, and nothing else is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "formats/page_header.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

using testing::HasSubstr;
using Json = nlohmann::ordered_json;

PageHeader Header(const std::vector<std::string>& schemes, LayerShape shape = {2, 32}, int page_size = 16) {
  std::vector<KvScheme> parsed;
  std::vector<LayerShape> shapes;
  for (const std::string& text : schemes) {
    parsed.push_back(KvScheme::Parse(text));
    const bool latents = Find(parsed.back().k.format).latents == MlaSupport::kRequired;
    shapes.push_back(latents ? LayerShape{1, shape.head_dim, 16} : shape);
  }
  return {.model = "test-model", .layout = PlanCache(parsed, shapes, page_size), .scales = {}};
}

std::string Refusal(std::string_view text) {
  try {
    PageHeaderFromJson(text);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

PageHeader ReadBack(const PageHeader& header) {
  return PageHeaderFromJson(PageHeaderToJson(header));
}

Json HeaderJson(const PageHeader& header) {
  return Json::parse(PageHeaderToJson(header));
}

// Both are of the same model, layout and scales: the text is part of the identity that pages are found by.
bool Fits(const PageHeader& a, const PageHeader& b) {
  return PageHeaderToJson(a) == PageHeaderToJson(b);
}

// Channels as they are, of equal deviations.
EigenChannels UnitChannels(int kv_heads, int head_dim, float deviation = 1) {
  const auto heads = static_cast<size_t>(kv_heads), size = static_cast<size_t>(head_dim);
  EigenChannels channels{.matrices = std::vector<float>(heads * size * size, 0.0F),
                         .deviations = std::vector<float>(heads * size, deviation)};
  for (size_t i = 0; i < heads * size; ++i) channels.matrices[i * size + i % size] = 1;
  return channels;
}

TEST(PageHeader, BitsOfChannelsAreComparedByTheirHash) {
  PageHeader header = Header({"klt3"});
  header.scales.resize(1);
  header.scales[0].k.mean.assign(64, 0.5F);
  EigenChannels channels = UnitChannels(2, 32);
  header.scales[0].k.query = MakeKltTransform(channels, 2, 32, 3);
  const PageHeader read = ReadBack(header);
  EXPECT_TRUE(Fits(read, header));
  channels.deviations.back() = 0.5F;  // the same matrix and bits, another weight of errors
  header.scales[0].k.query = MakeKltTransform(channels, 2, 32, 3);
  EXPECT_FALSE(Fits(read, header));
}

TEST(PageHeader, RoundTripsEveryFormat) {
  for (const Format& format : All()) {
    PageHeader header = Header({std::string(format.name), "k=int8,v=int4", "k=int8,v=int4"}, {2, 32}, 64);
    const bool k_scales = format.scaling.per_head;
    const bool v_scales = OnSide(format, false).scaling.per_head;
    if (k_scales || v_scales) header.scales.resize(3);
    if (k_scales) header.scales[0].k.scale = {0.1F, 1e-7F};
    if (v_scales) header.scales[0].v.scale = {3.0F, 1.0F / 3.0F};
    if (IsAllocated(format.code)) {
      header.scales.resize(3);
      header.scales[0].k.mean.assign(64, 0.5F);
      header.scales[0].k.query =
          MakeKltTransform(UnitChannels(2, 32), 2, 32, format.code_bits, format.scaling.channel_bits);
    }
    const PageHeader read = ReadBack(header);
    EXPECT_EQ(read.model, "test-model");
    EXPECT_EQ(read.layout.Identity(), header.layout.Identity());
    EXPECT_EQ(read.layout.groups[0].page_bytes, header.layout.groups[0].page_bytes) << format.name;
    EXPECT_EQ(read.layout.groups[0].exact_page_bytes, header.layout.groups[0].exact_page_bytes) << format.name;
    ASSERT_EQ(read.scales.size(), header.scales.size()) << format.name;
    if (!header.scales.empty()) {
      EXPECT_EQ(read.scales[0].k.scale, header.scales[0].k.scale);
      EXPECT_EQ(read.scales[0].v.scale, header.scales[0].v.scale);
    }
    EXPECT_TRUE(Fits(read, header)) << format.name;
  }
}

TEST(PageHeader, KeyMeansAreCarried) {
  PageHeader header = Header({"int4+mean"});
  header.scales.resize(1);
  header.scales[0].k.mean.assign(64, -1.5F);
  EXPECT_EQ(ReadBack(header).scales[0].k.mean, header.scales[0].k.mean);
}

TEST(PageHeader, OutlierChannelsAreCarriedAndChecked) {
  PageHeader header = Header({"int4+outliers=2"});
  header.scales.resize(1);
  header.scales[0].k.outliers = {3, 19, 0, 31};
  const PageHeader read = ReadBack(header);
  EXPECT_EQ(read.scales[0].k.outliers, header.scales[0].k.outliers);
  EXPECT_EQ(read.layout.layers[0].k.outliers, 2);
  EXPECT_TRUE(Fits(read, header));
  PageHeader other = header;
  other.scales[0].k.outliers = {3, 19, 0, 30};
  EXPECT_FALSE(Fits(read, other));
  for (const std::vector<int>& wrong : std::vector<std::vector<int>>{{3, 19, 0}, {3, 3, 0, 31}, {3, 19, 0, 32}}) {
    header.scales[0].k.outliers = wrong;
    EXPECT_THROW(ReadBack(header), InputError);
  }
}

TEST(PageHeader, QueryMatricesAreComparedByTheirHash) {
  PageHeader header = Header({"int4+query"});
  header.scales.resize(1);
  header.scales[0].k.mean.assign(64, 0.5F);
  std::vector<float> matrices(2048, 0.0F);
  for (size_t i = 0; i < 64; ++i) matrices[i * 32 + i % 32] = 1;
  header.scales[0].k.query = std::make_shared<QueryTransform>(matrices, 2, 32);
  EXPECT_EQ(HeaderJson(header)["layers"][0]["k"]["query"], "f32");
  EXPECT_EQ(HeaderJson(header)["layers"][0]["k"]["hadamard_block"], 0);
  const PageHeader read = ReadBack(header);
  EXPECT_EQ(read.scales[0].k.query_hash, header.scales[0].k.query->Hash());
  EXPECT_EQ(read.scales[0].k.mean, header.scales[0].k.mean);
  EXPECT_TRUE(Fits(read, header));
  PageHeader other = header;
  matrices[7] = 0.25F;
  other.scales[0].k.query = std::make_shared<QueryTransform>(matrices, 2, 32);
  EXPECT_FALSE(Fits(read, other));
  Json json = HeaderJson(header);
  for (const char* hash : {"", "xxh64-0", "fnv1a-0123456789abcdef"}) {
    json["scales"]["0"]["k_query"] = hash;
    EXPECT_THAT(Refusal(json.dump()), HasSubstr("k_query"));
  }
}

TEST(PageHeader, HeaderSpellsOutTheEncoding) {
  const PageHeader header = Header({"k=int8,v=int4", "k=int8,v=int4"});
  const Json json = HeaderJson(header);
  EXPECT_EQ(json.dump(), R"({"model":"test-model","record":"quantized","page_size":16,"layers":[{"layers":[0,1],)"
                         R"("scheme":"k=int8,v=int4","kv_heads":2,"head_dim":32,)"
                         R"("k":{"format":"int8","code":"int8","code_bits":8,"token_scale":"fp16",)"
                         R"("hadamard_block":32,"mean":false},)"
                         R"("v":{"format":"int4","code":"int4","code_bits":4,"block":32,"block_scale":"fp16",)"
                         R"("hadamard_block":32,"mean":false}}],"scales":{}})");
}

TEST(PageHeader, HeaderSpellsOutOffsetsTokenGroupsAndHeadScales) {
  const auto side = [](const char* scheme, const char* kind) {
    PageHeader header = Header({scheme}, {1, 96}, 32);
    header.scales.resize(1);
    header.scales[0].k.scale = header.scales[0].v.scale = {1.0F};
    return HeaderJson(header)["layers"][0][kind].dump();
  };
  EXPECT_EQ(side("kivi2", "k"),
            R"({"format":"kivi2","code":"uint2","code_bits":2,"tile":32,"channel_scale":"fp16","channel_zero":"fp16",)"
            R"("hadamard_block":0,"mean":false})");
  EXPECT_EQ(side("kivi2", "v"),
            R"({"format":"kivi2","code":"uint2","code_bits":2,"block":32,"block_scale":"fp16","block_zero":"fp16",)"
            R"("hadamard_block":0,"mean":false})");
  EXPECT_EQ(side("turboquant_3bit_nc", "k"),
            R"({"format":"turboquant_3bit_nc","code":"lloyd3","code_bits":3,"token_scale":"fp16",)"
            R"("hadamard_block":32,"mean":false})");
  EXPECT_EQ(side("turboquant_3bit_nc", "v"),
            R"({"format":"turboquant_v3","code":"uint3","code_bits":3,"token_scale":"fp16","token_zero":"fp16",)"
            R"("hadamard_block":0,"mean":false})");
  EXPECT_EQ(side("nvfp4", "k"),
            R"({"format":"nvfp4","code":"e2m1","code_bits":4,"head_scale":"f32","block":16,"block_scale":"e4m3",)"
            R"("hadamard_block":0,"mean":false})");
  EXPECT_EQ(side("mxfp8", "v"), R"({"format":"mxfp8","code":"e4m3","code_bits":8,"block":32,"block_scale":"e8m0",)"
                                R"("hadamard_block":0,"mean":false})");
}

TEST(PageHeader, HeaderSpellsOutPadding) {
  const PageHeader header = Header({"k=int8,v=int4"}, {1, 80});
  Json json = HeaderJson(header);
  EXPECT_EQ(json["layers"][0]["k"].dump(), R"({"format":"int8","code":"int8","code_bits":8,"token_scale":"fp16",)"
                                           R"("hadamard_block":16,"mean":false})");
  EXPECT_EQ(json["layers"][0]["v"].dump(),
            R"({"format":"int4","code":"int4","code_bits":4,"block":32,"block_scale":"fp16",)"
            R"("hadamard_block":32,"mean":false,"padded_head_dim":96})");
  EXPECT_TRUE(Fits(ReadBack(header), header));
  json["layers"][0]["v"]["padded_head_dim"] = 128;
  EXPECT_THAT(Refusal(json.dump()), HasSubstr("encodings"));
}

TEST(PageHeader, HostileHeadersAreRefusedWithTheReason) {
  PageHeader header = Header({"fp8", "int4", "int4"});
  header.scales.resize(3);
  header.scales[0].k.scale = {1.0F, 2.0F};
  header.scales[0].v.scale = {1.0F, 2.0F};
  const Json good = HeaderJson(header);
  ASSERT_EQ(Refusal(good.dump()), "");

  const auto refusal = [&](const char* pointer, const Json& value) {
    Json json = good;
    json[Json::json_pointer(pointer)] = value;
    return Refusal(json.dump());
  };
  EXPECT_THAT(refusal("/model", 5), HasSubstr("'model' is not a text"));
  EXPECT_THAT(refusal("/record", "exact"), HasSubstr("must be quantized"));
  EXPECT_THAT(refusal("/page_size", 48), HasSubstr("48"));
  EXPECT_THAT(refusal("/page_size", -1), HasSubstr("page_size"));
  EXPECT_THAT(refusal("/page_size", 18446744073709551615ULL), HasSubstr("page_size"));
  EXPECT_THAT(refusal("/page_size", 32.5), HasSubstr("page_size"));
  EXPECT_THAT(refusal("/layers", 1), HasSubstr("not a list"));
  EXPECT_THAT(refusal("/layers", Json::array()), HasSubstr("layers"));
  EXPECT_THAT(refusal("/layers/0", Json()), HasSubstr("lacks"));
  EXPECT_THAT(refusal("/layers/0/layers", {0, 1000000000}), HasSubstr("4095"));
  EXPECT_THAT(refusal("/layers/1/layers", {2, 2}), HasSubstr("leaves a layer out"));
  EXPECT_THAT(refusal("/layers/1/layers", {1, 0}), HasSubstr("layers"));
  EXPECT_THAT(refusal("/layers/0/scheme", "int9"), HasSubstr("int9"));
  EXPECT_THAT(refusal("/layers/0/scheme", "mla_fp8"), HasSubstr("stores the latents of MLA"));
  EXPECT_THAT(refusal("/layers/0/kv_heads", 65537), HasSubstr("kv_heads"));
  EXPECT_THAT(refusal("/layers/0/head_dim", 33), HasSubstr("33"));
  EXPECT_THAT(refusal("/layers/1/head_dim", 80), HasSubstr("encodings")) << "rows would be padded";
  EXPECT_THAT(refusal("/layers/1/k/block", 16), HasSubstr("encodings"));
  EXPECT_THAT(refusal("/layers/1/k/code", "u4"), HasSubstr("encodings"));
  EXPECT_THAT(refusal("/scales", 0), HasSubstr("scales"));
  EXPECT_THAT(refusal("/scales/0/k_scale", {1.0}), HasSubstr("2 numbers"));
  EXPECT_THAT(refusal("/scales/0/k_scale", {1.0, 0.0}), HasSubstr("above 0"));
  EXPECT_THAT(refusal("/scales/0/k_scale", {1.0, 1e300}), HasSubstr("finite"));
  EXPECT_THAT(refusal("/scales/0/k_scale", {1.0, "x"}), HasSubstr("finite"));
  EXPECT_THAT(refusal("/scales/1", Json::object()), HasSubstr("names layers"));
  for (const char* text : {"", "null", "[]", "{", "{\"model\":\"\xff\"}", "5"}) {
    EXPECT_NE(Refusal(text), "") << text;
  }
  EXPECT_NE(Refusal(std::string(100000, '[')), "");
}

TEST(PageHeader, HostileHeadersOfTokenGroupsAreRefused) {
  const PageHeader header = Header({"kivi4"}, {2, 32}, 32);
  const Json good = HeaderJson(header);
  ASSERT_EQ(Refusal(good.dump()), "");
  const auto refusal = [&](const char* pointer, const Json& value) {
    Json json = good;
    json[Json::json_pointer(pointer)] = value;
    return Refusal(json.dump());
  };
  EXPECT_THAT(refusal("/page_size", 16), HasSubstr("32 tokens"));
  EXPECT_THAT(refusal("/layers/0/scheme", "kivi4+exact=none"), HasSubstr("exact=open"));
  EXPECT_THAT(refusal("/layers/0/k/tile", 16), HasSubstr("encodings"));
  EXPECT_THAT(refusal("/layers/0/v/block_zero", "none"), HasSubstr("encodings"));
  EXPECT_THAT(refusal("/layers/0/k", good["layers"][0]["v"]), HasSubstr("encodings"));
}

TEST(PageHeader, FitsOnlyTheSameModelLayoutAndScales) {
  PageHeader cache = Header({"fp8"});
  cache.scales.resize(1);
  cache.scales[0].k.scale = {1.0F, 2.0F};
  cache.scales[0].v.scale = {1.0F, 2.0F};
  PageHeader page = cache;
  EXPECT_TRUE(Fits(page, cache));
  page.model = "other";
  EXPECT_FALSE(Fits(page, cache));
  page = cache;
  page.scales[0].v.scale[1] = 2.5F;
  EXPECT_FALSE(Fits(page, cache));
  page = cache;
  page.layout = Header({"int8"}).layout;
  page.scales.clear();
  EXPECT_FALSE(Fits(page, cache));
}

}  // namespace
}  // namespace kvanta::formats
