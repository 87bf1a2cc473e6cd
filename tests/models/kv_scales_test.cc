#include "models/kv_scales.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "error_of.h"
#include "kvanta/error.h"
#include "models/fingerprint.h"
#include "models/kv_scale_names.h"
#include "weights/safetensors_bytes.h"
#include "weights/temp_folder.h"

namespace kvanta::models {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

ModelConfig Config(int layers = 2, int kv_heads = 2) {
  ModelConfig config;
  config.architecture = "LlamaForCausalLM";
  config.model_type = "llama";
  config.layers = layers;
  config.kv_heads = kv_heads;
  config.heads = 4;
  config.head_dim = 8;
  FillLayerSpecs(config);
  return config;
}

// --- Scale files ---

json ByRank() {
  return json::parse(R"({"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn",
    "scaling_factor": {"0": {"0": 0.5, "1": 0.25}, "1": {"0": 2.0, "1": 1}}}})");
}

json Own() {
  return json::parse(R"({"kvanta_kv_scales": 1,
    "model": {"architecture": "LlamaForCausalLM", "layers": 2, "kv_heads": 2, "head_dim": 8, "hash": "fnv1a-0"},
    "granularity": "head",
    "layers": {"0": {"k_scale": [1, 2], "v_scale": [3, 4]}, "1": {"k_scale": [5, 6], "v_scale": [7, 8]}}})");
}

std::string FileError(const json& file, const ModelConfig& config = Config(), const char* fingerprint = "") {
  return ErrorOf([&] { ParseScaleFile(file.dump(), "s.json", config, fingerprint); });
}

TEST(ScaleFile, ScalesOfKAndVApart) {
  json file = ByRank();
  file["kv_cache"]["scaling_factor"]["1"]["0"] = {2.0, 3.0};
  const KvScales scales = ParseScaleFile(file.dump(), "s.json", Config());
  EXPECT_THAT(scales.layers[0].k.scale, ElementsAre(0.5F, 2.0F));
  EXPECT_THAT(scales.layers[0].v.scale, ElementsAre(0.5F, 3.0F));
  for (const char* wrong : {"[1]", "[1, 2, 3]", "[1, -1]", "[1, 1e-40]"}) {
    file["kv_cache"]["scaling_factor"]["1"]["0"] = json::parse(wrong);
    EXPECT_THAT(FileError(file), HasSubstr("expected a")) << wrong;
  }
}

TEST(ScaleFile, Utf16IsNamed) {
  const std::string file("\xff\xfe{\0\"\0k\0", 8);
  EXPECT_THAT(ErrorOf([&] { ParseScaleFile(file, "s.json", Config()); }), HasSubstr("is encoded in UTF-16"));
}

TEST(ScaleFile, RanksAreHeads) {
  const KvScales scales = ParseScaleFile(ByRank().dump(), "s.json", Config());
  EXPECT_EQ(scales.source, ScaleSource::kFile);
  EXPECT_THAT(scales.layers[0].k.scale, ElementsAre(0.5F, 2.0F));
  EXPECT_THAT(scales.layers[0].v.scale, ElementsAre(0.5F, 2.0F));
  EXPECT_THAT(scales.layers[1].k.scale, ElementsAre(0.25F, 1.0F));
}

TEST(ScaleFile, MoreHeadsThanRanks) {
  ModelConfig config = Config(2, 4);
  EXPECT_THAT(ParseScaleFile(ByRank().dump(), "s.json", config).layers[0].k.scale, ElementsAre(0.5F, 0.5F, 2.0F, 2.0F));
  config.kv_heads = 3;
  EXPECT_THAT(FileError(ByRank(), config), HasSubstr("a number of ranks that divides the 3 KV heads"));
}

TEST(ScaleFile, RanksThatShareAHeadMustAgree) {
  const ModelConfig config = Config(2, 1);
  EXPECT_THAT(FileError(ByRank(), config), HasSubstr("another rank with the same KV head 0"));
  json file = ByRank();
  file["kv_cache"]["scaling_factor"]["1"] = file["kv_cache"]["scaling_factor"]["0"];
  EXPECT_THAT(ParseScaleFile(file.dump(), "s.json", config).layers[1].v.scale, ElementsAre(0.25F));
}

// A byte of the FNUZ variant reads as half: the same bytes, stored as FN, need half the scale.
TEST(ScaleFile, FnuzOnlyWhereDeclared) {
  json file = ByRank();
  file["kv_cache"]["dtype"] = "float8_e4m3fnuz";
  EXPECT_THAT(ParseScaleFile(file.dump(), "s.json", Config()).layers[0].k.scale, ElementsAre(0.25F, 1.0F));
}

TEST(ScaleFile, KnownFilesOfTheField) {
  const std::string path = std::string(KVANTA_TEST_DATA) + "/kv_scales/kv_cache_scales_llama3_8b.json";
  std::ifstream file(path);
  ASSERT_TRUE(file) << path;
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const KvScales scales = ParseScaleFile(text, path, Config(32, 8));
  EXPECT_FLOAT_EQ(scales.layers[0].k.scale[7], 0.0408F);
  EXPECT_FLOAT_EQ(scales.layers[3].v.scale[0], 0.0909F);
  EXPECT_THAT(ErrorOf([&] { ParseScaleFile(text, path, Config(31, 8)); }), HasSubstr("not one of the 31 layers"));
  EXPECT_THAT(ErrorOf([&] { ParseScaleFile(text, path, Config(33, 8)); }), HasSubstr("all 33 layers must be there"));
}

struct Edit {
  const char* pointer;  // JSON pointer of the value that is replaced
  const char* value;    // JSON; "" removes it
  const char* message;
};

std::string ErrorAfter(json file, const Edit& edit) {
  const json::json_pointer pointer(edit.pointer);
  if (*edit.value != '\0') {
    file[pointer] = json::parse(edit.value);
  } else {
    file[pointer.parent_pointer()].erase(pointer.back());
  }
  return FileError(file, Config(), "fnv1a-0");
}

TEST(ScaleFile, EveryFaultOfTheKnownSchemaIsNamed) {
  for (const Edit& edit : std::initializer_list<Edit>{
           {"/model_type", "\"qwen2\"", "'model_type' is 'qwen2'; expected 'llama'"},
           {"/model_type", "7", "expected text"},
           {"/kv_cache", "3", "expected an object"},
           {"/kv_cache/dtype", "", "'kv_cache.dtype' is missing"},
           {"/kv_cache/dtype", "\"float8_e5m2\"", "expected float8_e4m3fn or float8_e4m3fnuz"},
           {"/kv_cache/scale_factor", "{}", "known keys: dtype, scaling_factor"},
           {"/kv_cache/scaling_factor", "{}", "a number of ranks"},
           {"/kv_cache/scaling_factor", "[]", "expected an object"},
           {"/kv_cache/scaling_factor/0", "", "all 1 tensor-parallel ranks must be there"},
           {"/kv_cache/scaling_factor/1/1", "", "scaling_factor.1.1' is missing; all 2 layers"},
           {"/kv_cache/scaling_factor/1/2", "1.0", "not one of the 2 layers"},
           {"/kv_cache/scaling_factor/1/01", "1.0", "not one of the 2 layers"},
           {"/kv_cache/scaling_factor/1/-1", "1.0", "not one of the 2 layers"},
           {"/kv_cache/scaling_factor/0/0", "0", "is 0; expected a number above 0"},
           {"/kv_cache/scaling_factor/0/0", "-0.5", "expected a number above 0"},
           {"/kv_cache/scaling_factor/0/0", "-1.0", "never calibrated"},
           {"/kv_cache/scaling_factor/0/0", "1e-60", "expected a number above 0"},
           {"/kv_cache/scaling_factor/0/0", "1e60", "expected a number above 0"},
           {"/kv_cache/scaling_factor/0/0", "\"0.5\"", "is '0.5'; expected a number"},
           {"/kv_cache/scaling_factor/0/0", "[0.5]", "is a list of 1; expected a number"},
           {"/kv_cache/scaling_factor/0/0", "null", "is missing"},
           {"/extra", "1", "known keys: model_type, kv_cache"},
           {"/kv_cache", "", "not a scale file"},
       }) {
    EXPECT_THAT(ErrorAfter(ByRank(), edit), HasSubstr(edit.message)) << edit.pointer << " = " << edit.value;
  }
}

// Sparse: a file's length says nothing of its place on the disk.
TEST(ScaleFile, FilesWithoutEndAreNotRead) {
  const weights::TempFolder folder;
  const std::string path = folder.Write("s", "{");
  std::filesystem::resize_file(path, uint64_t{1} << 40);
  EXPECT_THAT(ErrorOf([&] { ReadScaleFile(path, Config()); }),
              HasSubstr("1099511627776 bytes; at most 1073741824 are read"));
  EXPECT_THAT(ErrorOf([&] { ParseScaleFile(std::string(100'000'001, ' '), "s.json", Config()); }),
              HasSubstr("s.json: 100000001 bytes; at most 100000000 are read"));
}

TEST(ScaleFile, OwnSchema) {
  json file = Own();
  KvScales scales = ParseScaleFile(file.dump(), "s.json", Config(), "fnv1a-0");
  EXPECT_THAT(scales.layers[1].k.scale, ElementsAre(5, 6));
  EXPECT_THAT(scales.layers[0].v.scale, ElementsAre(3, 4));
  EXPECT_TRUE(scales.layers[0].k.mean.empty());
  file["granularity"] = "tensor";
  file["layers"]["0"] = {{"k_scale", 0.5}, {"v_scale", 0.25}, {"k_mean", json(2, json(8, 1.5))}};
  file["layers"]["1"] = {{"k_scale", 1}, {"v_scale", 2}};
  scales = ParseScaleFile(file.dump(), "s.json", Config(), "fnv1a-0");
  EXPECT_THAT(scales.layers[0].k.scale, ElementsAre(0.5F, 0.5F));
  EXPECT_EQ(scales.layers[0].k.mean, std::vector<float>(16, 1.5F));
  EXPECT_TRUE(scales.layers[0].k.outliers.empty());
  file["layers"]["1"]["k_outliers"] = {{0, 7}, {2, 3}};
  EXPECT_THAT(ParseScaleFile(file.dump(), "s.json", Config()).layers[1].k.outliers, ElementsAre(0, 7, 2, 3));
}

TEST(ScaleFile, EveryFaultOfTheOwnSchemaIsNamed) {
  for (const Edit& edit : std::initializer_list<Edit>{
           {"/kvanta_kv_scales", "2", "expected 1, the version"},
           {"/model", "", "'model' is missing"},
           {"/model/layers", "3", "the file belongs to another"},
           {"/model/kv_heads", "4", "the file belongs to another"},
           {"/model/head_dim", "", "missing"},
           {"/model/hash", "\"fnv1a-1\"", "the hash of these weights"},
           {"/model/architecture", "\"Qwen2ForCausalLM\"", "belongs to another model"},
           {"/granularity", "\"channel\"", "\"tensor\" or \"head\""},
           {"/layers/1", "", "all 2 layers"},
           {"/layers/2", "{}", "not one of the 2 layers"},
           {"/layers/0/k_scale", "", "one number per KV head"},
           {"/layers/0/k_scale", "1.0", "a list of 2 numbers"},
           {"/layers/0/k_scale", "[1]", "a list of 2 numbers"},
           {"/layers/0/v_scale", "[1, -1]", "never calibrated"},
           {"/layers/0/v_scale", "[1, 0]", "above 0"},
           {"/layers/0/k_scale", "[1, 1e60]", "above 0"},
           {"/layers/0/k_zero", "[1, 0]", "known keys: k_scale, v_scale, k_mean, k_outliers"},
           {"/layers/0/k_outliers", "[[1]]", "2 lists of equally many channels, ascending, from 0 to 7"},
           {"/layers/0/k_outliers", "[[1], []]", "2 lists of equally many channels"},
           {"/layers/0/k_outliers", "[[], []]", "2 lists of equally many channels"},
           {"/layers/0/k_outliers", "[[1], 2]", "2 lists of equally many channels"},
           {"/layers/0/k_outliers", "[[1], [8]]", "2 lists of equally many channels"},
           {"/layers/0/k_outliers", "[[1], [-1]]", "2 lists of equally many channels"},
           {"/layers/0/k_outliers", "[[1], [1.5]]", "2 lists of equally many channels"},
           {"/layers/0/k_outliers", "[[1, 3], [3, 3]]", "ascending"},
           {"/layers/0/k_mean", "[[1], [2]]", "2 lists of 8 finite numbers"},
           {"/layers/0/k_mean", "[[1,2,3,4,5,6,7,8], [1,2,3,4,5,6,7,1e60]]", "finite numbers"},
       }) {
    EXPECT_THAT(ErrorAfter(Own(), edit), HasSubstr(edit.message)) << edit.pointer << " = " << edit.value;
  }
}

// --- Checkpoints ---

using Tensor = std::pair<std::string, std::vector<float>>;

KvScales ScalesOf(const weights::Checkpoint& checkpoint, const ModelConfig& config) {
  return ReadScaleTensors(checkpoint, config);
}

class CheckpointScales : public testing::Test {
 protected:
  // A checkpoint with these tensors of shape [] (one value) or [n], and one weight.
  weights::Checkpoint Make(const std::vector<Tensor>& tensors) {
    weights::SafetensorsWriter writer;
    writer.Add("model.norm.weight", {2}, {1, 2});
    for (const auto& [name, values] : tensors) {
      writer.Add(name, values.size() == 1 ? std::vector<int64_t>{} : std::vector<int64_t>{int64_t(values.size())},
                 values);
    }
    folder_.Write("model.safetensors", writer.File());
    return weights::Checkpoint::Open(folder_.Path());
  }
  // Both layers, from names with {} for the layer.
  static std::vector<Tensor> BothLayers(const std::string& k, const std::string& v) {
    std::vector<Tensor> tensors;
    for (int layer = 0; layer < 2; ++layer) {
      const std::string prefix = fmt::format("model.layers.{}.", layer);
      tensors.emplace_back(prefix + k, std::vector<float>{0.5F + static_cast<float>(layer)});
      if (v != k) tensors.emplace_back(prefix + v, std::vector<float>{0.25F + static_cast<float>(layer)});
    }
    return tensors;
  }
  std::string Error(const std::vector<Tensor>& tensors, const ModelConfig& config = Config()) {
    return ErrorOf([&] { ScalesOf(Make(tensors), config); });
  }
  weights::TempFolder folder_;
};

TEST_F(CheckpointScales, EveryNameOfTheField) {
  const std::pair<const char*, const char*> names[] = {
      {"self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"},
      {"self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"},
      {"self_attn.qkqkv_proj.k_scale", "self_attn.qkqkv_proj.v_scale"},
      {"self_attn.k_scale", "self_attn.v_scale"},
      {"self_attn.attn.k_scale", "self_attn.attn.v_scale"},
      {"mixer.k_proj.k_scale", "mixer.v_proj.v_scale"},
      {"self_attn.k_cache.scale", "self_attn.v_cache.scale"},
      {"self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"},
      {"self_attn.kv_scale", "self_attn.kv_scale"},
      {"attention.kv_cache_scaling_factor", "attention.kv_cache_scaling_factor"}};
  for (const auto& [k, v] : names) {
    const KvScales scales = ScalesOf(Make(BothLayers(k, v)), Config());
    const float v0 = std::string(k) == v ? 0.5F : 0.25F;
    EXPECT_EQ(scales.source, ScaleSource::kCheckpoint) << k;
    EXPECT_THAT(scales.layers[0].k.scale, ElementsAre(0.5F, 0.5F)) << k;
    EXPECT_THAT(scales.layers[0].v.scale, ElementsAre(v0, v0)) << k;
    EXPECT_THAT(scales.layers[1].v.scale, ElementsAre(v0 + 1, v0 + 1)) << k;
    EXPECT_TRUE(IsKvScaleTensor(std::string("model.layers.0.") + k));
  }
  for (const char* ignored :
       {"self_attn.q_scale", "self_attn.q.scale", "self_attn.prob_output_scale", "self_attn.q_proj.output_scale",
        "self_attn.attn.q_scale", "self_attn.q_zero_point", "self_attn.attn.prob_scale", "self_attn.prob_scale",
        "self_attn.k_global_scale", "self_attn.v_global_scale"}) {
    EXPECT_EQ(ScalesOf(Make({{std::string("model.layers.0.") + ignored, {-1}}}), Config()).source, ScaleSource::kNone);
  }
  EXPECT_FALSE(IsKvScaleTensor("model.layers.0.self_attn.k_proj.weight"));
}

TEST_F(CheckpointScales, PerHeadAndThreeDimensional) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{2, 1, 1}, {2, 1}, {1, 2}, {2}}) {
    weights::SafetensorsWriter writer;
    for (const char* layer : {"0", "1"}) {
      const std::string prefix = fmt::format("model.layers.{}.self_attn.", layer);
      writer.Add(prefix + "k_scale", shape, {1, 2});
      writer.Add(prefix + "v_scale", {1, 1}, {3});
    }
    folder_.Write("model.safetensors", writer.File());
    const KvScales scales = ScalesOf(weights::Checkpoint::Open(folder_.Path()), Config());
    EXPECT_THAT(scales.layers[1].k.scale, ElementsAre(1, 2));
    EXPECT_THAT(scales.layers[1].v.scale, ElementsAre(3, 3));
  }
}

// A multimodal checkpoint, whose towers have layers and scales, too.
TEST_F(CheckpointScales, OfTheDecoderAlone) {
  ModelConfig config = Config();
  config.names.decoders = {{"language_model.model.", "language_model.lm_head"}, {"model.language_model.", "lm_head"}};
  config.num_nextn_predict_layers = 1;
  for (const std::string prefix : {"language_model.model.", "model.language_model.", "model."}) {
    std::vector<Tensor> tensors = BothLayers("self_attn.k_scale", "self_attn.v_scale");
    for (Tensor& tensor : tensors) tensor.first = prefix + tensor.first.substr(std::string("model.").size());
    tensors.emplace_back("language_model.model.embed_tokens.weight", std::vector<float>{1});
    tensors.emplace_back("vision_tower.vision_model.encoder.layers.0.self_attn.k_scale", std::vector<float>{9});
    tensors.emplace_back("vision_tower.encoder.layers.7.self_attn.k_proj.k_scale", std::vector<float>{-1});
    tensors.emplace_back("model.vision_tower.blocks.0.attn.key_scale", std::vector<float>{0});
    tensors.emplace_back("mtp.layers.0.self_attn.v_scale", std::vector<float>{9});
    tensors.emplace_back("language_model.model.layers.2.self_attn.k_scale", std::vector<float>{9});
    tensors.emplace_back("language_model.model.mtp_block.0.self_attn.k_scale", std::vector<float>{9});
    const KvScales scales = ScalesOf(Make(tensors), config);
    EXPECT_THAT(scales.layers[1].k.scale, ElementsAre(1.5F, 1.5F)) << prefix;
  }
  EXPECT_THAT(Error({{"language_model.model.embed_tokens.weight", {1}},
                     {"language_model.model.layers.0.self_attn.key_scale", {1}}},
                    config),
              HasSubstr("looks like a KV scale"));
}

std::vector<formats::LayerScheme> LayersOf(const char* scheme, const ModelConfig& config = Config()) {
  const std::vector<formats::LayerShape> shapes(2, {config.kv_heads, config.head_dim});
  return formats::PlanCache(std::vector(2, KvScheme::Parse(scheme)), shapes, 64).layers;
}

// Scales of a format that is not known are measured for other values than fp8 stores.
TEST_F(CheckpointScales, OfAnUnknownDeclaration) {
  ModelConfig config = Config();
  config.declared_kv_cache_error = "config.json: key 'type' is 'int'";
  const weights::Checkpoint with = Make(BothLayers("self_attn.k_scale", "self_attn.v_scale"));
  const auto fp8 = LayersOf("fp8_e4m3"), int8 = LayersOf("int8");
  EXPECT_THAT(ErrorOf([&] { ReadScaleTensors(with, config, {.layers = fp8}); }),
              HasSubstr("'int'; so the checkpoint's KV scales ('model.layers.0.self_attn.k_scale') are not those of "
                        "fp8_e4m3"));
  EXPECT_EQ(ReadScaleTensors(with, config, {.layers = fp8, .measured = true}).source, ScaleSource::kNone);
  EXPECT_NO_THROW(ReadScaleTensors(with, config, {.layers = int8}));
  const weights::Checkpoint without = Make({});
  EXPECT_EQ(ReadScaleTensors(without, config, {.layers = fp8}).source, ScaleSource::kNone);
}

TEST_F(CheckpointScales, MeasuredOnesReplaceThoseOfTheCheckpoint) {
  const auto fp8 = LayersOf("fp8_e4m3+mean");
  const weights::Checkpoint zeros = Make({{"model.layers.0.self_attn.k_scale", {0}},
                                          {"model.layers.1.self_attn.k_zero_point", {3}},
                                          {"model.layers.0.self_attn.k_proj.k_bias", std::vector<float>(16, 3)}});
  const KvScales scales = ReadScaleTensors(zeros, Config(), {.layers = fp8, .measured = true});
  EXPECT_EQ(scales.source, ScaleSource::kNone);
  EXPECT_EQ(scales.layers[0].k.mean, std::vector<float>(16, 3)) << "the mean is measured with, not measured";
}

TEST_F(CheckpointScales, BiasesOfModelOptAreKeyMeans) {
  const auto make = [&](float v_bias) {
    weights::SafetensorsWriter writer;
    for (const char* layer : {"0", "1"}) {
      const std::string prefix = fmt::format("model.layers.{}.self_attn.", layer);
      writer.Add(prefix + "k_proj.k_scale", {}, {2});
      writer.Add(prefix + "v_proj.v_scale", {}, {3});
      writer.Add(prefix + "k_proj.k_bias", {1, 2, 1, 8}, std::vector<float>(16, 5));
      writer.Add(prefix + "v_proj.v_bias", {1, 2, 1, 8}, std::vector<float>(16, v_bias));
    }
    folder_.Write("model.safetensors", writer.File());
    return weights::Checkpoint::Open(folder_.Path());
  };
  const auto mean = LayersOf("k=fp8_e4m3+mean,v=fp8_e4m3"), none = LayersOf("fp8_e4m3"),
             other_v = LayersOf("k=fp8_e4m3+mean,v=int8"), dynamic = LayersOf("int8+mean");
  {
    const weights::Checkpoint symmetric = make(0);
    const KvScales scales = ReadScaleTensors(symmetric, Config(), {.layers = mean});
    EXPECT_EQ(scales.layers[1].k.mean, std::vector<float>(16, 5));
    EXPECT_THAT(scales.layers[1].k.scale, ElementsAre(2, 2));
    EXPECT_THAT(ErrorOf([&] { ReadScaleTensors(symmetric, Config(), {.layers = none}); }),
                HasSubstr("K's scales are of K without it, which +mean stores: give kv_cache_dtype k=fp8_e4m3+mean"));
  }
  const weights::Checkpoint biased = make(1);
  EXPECT_THAT(ErrorOf([&] { ReadScaleTensors(biased, Config(), {.layers = mean}); }), HasSubstr("V's scales are of V"));
  EXPECT_NO_THROW(ReadScaleTensors(biased, Config(), {.layers = other_v}));
  EXPECT_EQ(ReadScaleTensors(biased, Config(), {.layers = dynamic}).layers[0].k.mean.size(), 16U);
}

// msModelSlim's C8: scales and zero points of channels, for codes of -128 to 127.
TEST_F(CheckpointScales, OfAnInt8CacheAreConverted) {
  weights::SafetensorsWriter writer;
  for (const char* layer : {"0", "1"}) {
    const std::string prefix = fmt::format("model.layers.{}.self_attn.", layer);
    std::vector<float> scale(16, 0.5F), offset(16, 0);
    scale[3] = 7;
    offset[15] = 12;
    writer.Add(prefix + "k_proj.kv_cache_scale", {16}, scale);
    writer.Add(prefix + "v_proj.kv_cache_scale", {16}, std::vector<float>(16, 0.5F));
    writer.Add(prefix + "v_proj.kv_cache_offset", {16}, offset);
  }
  folder_.Write("model.safetensors", writer.File());
  const KvScales scales = ScalesOf(weights::Checkpoint::Open(folder_.Path()), Config());
  EXPECT_THAT(scales.layers[0].k.scale, ElementsAre(2 * 7 * 128 / 448.0F, 2 * 0.5F * 128 / 448));
  EXPECT_THAT(scales.layers[1].v.scale, ElementsAre(2 * 0.5F * 128 / 448, 2 * 0.5F * 140 / 448));
  EXPECT_THAT(scales.note, HasSubstr("INT8"));
}

TEST_F(CheckpointScales, NoneIsOne) {
  const KvScales scales = ScalesOf(Make({}), Config());
  EXPECT_EQ(scales.source, ScaleSource::kNone);
  ASSERT_EQ(scales.layers.size(), 2U);
  EXPECT_THAT(scales.layers[1].v.scale, ElementsAre(1.0F, 1.0F));
}

TEST_F(CheckpointScales, FailsClosed) {
  ModelConfig declared = Config();
  declared.declared_kv_cache = "fp8_e4m3";
  EXPECT_EQ(ScalesOf(Make({}), declared).source, ScaleSource::kNone) << "ModelOpt's cast: no scale anywhere is 1.0";
  const auto tensors = [](float value) { return std::vector<Tensor>{{"model.layers.0.self_attn.k_scale", {value}}}; };
  EXPECT_THAT(Error(tensors(1)), HasSubstr("layer 0 has no V scale"));
  EXPECT_THAT(Error({tensors(1)[0], {"model.layers.0.self_attn.v_scale", {1}}}), HasSubstr("layer 1 has no K scale"));
  EXPECT_THAT(Error(tensors(-1)), HasSubstr("never calibrated"));
  EXPECT_THAT(Error(tensors(0)), HasSubstr("above 0"));
  EXPECT_THAT(Error(tensors(1e-40F)), HasSubstr("from 1.2e-38 to 8.5e37"));
  EXPECT_THAT(Error(tensors(3e38F)), HasSubstr("from 1.2e-38 to 8.5e37"));
  EXPECT_THAT(Error(tensors(NAN)), HasSubstr("above 0"));
  EXPECT_THAT(Error(tensors(INFINITY)), HasSubstr("above 0"));
  EXPECT_THAT(Error({{"model.layers.0.self_attn.k_scale", {1, 2, 3}}}),
              HasSubstr("expected [], [1], [2] or [2, 1, 1]"));
  EXPECT_THAT(Error({{"model.layers.2.self_attn.k_scale", {1}}}), HasSubstr("of layer 2; the model has 2"));
  EXPECT_THAT(Error({{"model.layers.0.self_attn.kv_scale", {1}}, {"model.layers.0.self_attn.k_scale", {2}}}),
              HasSubstr("disagree about the same values"));
  EXPECT_THAT(Error({{"model.layers.0.self_attn.key_scale", {1}}}), HasSubstr("looks like a KV scale"));
  EXPECT_THAT(Error({{"k_scale", {1}}}), HasSubstr("looks like a KV scale"));
  EXPECT_THAT(Error({{"model.layers.0.self_attn.k_zero_point", {1}}}), HasSubstr("asymmetric"));
  EXPECT_THAT(Error({{"model.layers.0.self_attn.k_proj.k_bias", {0, 0, 3}}}), HasSubstr("expected [2, 8]"));
}

TEST_F(CheckpointScales, NvFp4IsAnotherConvention) {
  ModelConfig config = Config();
  config.declared_kv_cache = "nvfp4";
  EXPECT_EQ(ScalesOf(Make(BothLayers("self_attn.k_scale", "self_attn.v_scale")), config).source, ScaleSource::kNone);
}

TEST_F(CheckpointScales, OfTheLayersThatDeclareThem) {
  ModelConfig config = Config();
  config.declared_kv_cache_layers = {"k=fp8_e4m3,v=nvfp4", ""};
  const auto tensors = Make({{"model.layers.0.self_attn.k_proj.k_scale", {3}},
                             {"model.layers.0.self_attn.v_proj.v_scale", {5}}});  // NVFP4: another convention
  KvScales scales = ScalesOf(tensors, config);
  EXPECT_EQ(scales.source, ScaleSource::kCheckpoint);
  EXPECT_THAT(scales.layers[0].k.scale, ElementsAre(3, 3));
  EXPECT_THAT(scales.layers[0].v.scale, ElementsAre(1, 1));
  EXPECT_THAT(scales.layers[1].k.scale, ElementsAre(1, 1));
  // A cache that needs more of them than the checkpoint declares.
  const auto fp8 = LayersOf("fp8_e4m3"), bf16 = LayersOf("bf16");
  EXPECT_THAT(ErrorOf([&] { ReadScaleTensors(tensors, config, {.layers = fp8}); }),
              HasSubstr("layer 0 has no V scale"));
  EXPECT_EQ(ReadScaleTensors(tensors, config, {.layers = bf16}).layers[0].k.scale[0], 3);
  EXPECT_EQ(ScalesOf(Make({}), config).source, ScaleSource::kNone);
}

TEST_F(CheckpointScales, TheFileComesFirst) {
  const weights::Checkpoint checkpoint = Make(BothLayers("self_attn.k_scale", "self_attn.v_scale"));
  const std::string path = folder_.Write("s.json", ByRank().dump());
  EXPECT_EQ(LoadKvScales(path, checkpoint, Config()).source, ScaleSource::kFile);
  EXPECT_EQ(LoadKvScales("", checkpoint, Config()).source, ScaleSource::kCheckpoint);
  EXPECT_THROW(LoadKvScales(folder_.Path() + "/none.json", checkpoint, Config()), InputError);
  json own = Own();
  own["model"]["hash"] = Fingerprint(checkpoint);
  EXPECT_EQ(LoadKvScales(folder_.Write("s.json", own.dump()), checkpoint, Config()).layers[0].k.scale[1], 2.0F);
  EXPECT_THAT(ErrorOf([&] { LoadKvScales(folder_.Write("s.json", Own().dump()), checkpoint, Config()); }),
              HasSubstr("the hash of these weights"));
}

TEST_F(CheckpointScales, FingerprintIsOfTheWeights) {
  const std::string plain = Fingerprint(Make({}));
  EXPECT_EQ(Fingerprint(Make(BothLayers("self_attn.k_scale", "self_attn.v_scale"))), plain);
  EXPECT_NE(Fingerprint(Make({{"x", {1}}})), plain);
  EXPECT_NE(Fingerprint(Make({{"x", {1}}})), Fingerprint(Make({{"x", {2}}})));
}

}  // namespace
}  // namespace kvanta::models
