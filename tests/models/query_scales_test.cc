// Matrices of +query in scale files (safetensors) and in checkpoints: read as they are, or refused with the reason.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "error_of.h"
#include "kvanta/error.h"
#include "models/kv_scale_names.h"
#include "models/kv_scales.h"
#include "weights/safetensors_bytes.h"
#include "weights/temp_folder.h"

namespace kvanta::models::query_scales {
namespace {

using nlohmann::json;
using testing::HasSubstr;

constexpr int kLayers = 2, kKvHeads = 2, kHeadDim = 8;

ModelConfig Config() {
  ModelConfig config;
  config.architecture = "LlamaForCausalLM";
  config.model_type = "llama";
  config.layers = kLayers;
  config.kv_heads = kKvHeads;
  config.heads = 4;
  config.head_dim = kHeadDim;
  FillLayerSpecs(config);
  return config;
}

std::vector<float> Matrices(float corner = 1) {
  std::vector<float> matrices(kKvHeads * kHeadDim * kHeadDim, 0.0F);
  for (size_t i = 0; i < kKvHeads * kHeadDim; ++i) matrices[i * kHeadDim + i % kHeadDim] = 2;
  matrices[0] = corner;
  return matrices;
}

json Own() {
  json mean = json::array({std::vector<float>(kHeadDim, 0.5F), std::vector<float>(kHeadDim, -1.0F)});
  json layer = {{"k_scale", 1}, {"v_scale", 1}, {"k_mean", mean}};
  return {{"kvanta_kv_scales", 1},
          {"model",
           {{"architecture", "LlamaForCausalLM"},
            {"layers", kLayers},
            {"kv_heads", kKvHeads},
            {"head_dim", kHeadDim},
            {"hash", "fnv1a-0"}}},
          {"granularity", "tensor"},
          {"layers", {{"0", layer}, {"1", layer}}}};
}

using Tensors = std::vector<std::tuple<std::string, std::vector<int64_t>, std::vector<float>>>;

Tensors BothLayers(const std::string& prefix = "layers.") {
  Tensors tensors;
  for (int layer = 0; layer < kLayers; ++layer) {
    tensors.emplace_back(fmt::format("{}{}.k_query", prefix, layer), std::vector<int64_t>{kKvHeads, kHeadDim, kHeadDim},
                         Matrices(static_cast<float>(layer + 1)));
  }
  return tensors;
}

// A scale file; `own`: its metadata, or null for none.
std::string File(const Tensors& tensors, const json& own = Own()) {
  std::string header, data;
  for (const auto& [name, shape, values] : tensors) {
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    header += fmt::format(R"(,"{}":{{"dtype":"F32","shape":{},"data_offsets":[{},{}]}})", name, json(shape).dump(),
                          begin, data.size());
  }
  const json metadata = own.is_null() ? json{{"format", "pt"}} : json{{"kvanta_kv_scales", own.dump()}};
  return weights::SafetensorsFile(fmt::format(R"({{"__metadata__":{}{}}})", metadata.dump(), header), data);
}

std::string FileError(const Tensors& tensors, const json& own = Own(), const char* fingerprint = "") {
  return ErrorOf([&] { ParseScaleFile(File(tensors, own), "q.safetensors", Config(), fingerprint); });
}

TEST(QueryScaleFile, HasMatricesBesideScalesAndMeans) {
  const KvScales scales = ParseScaleFile(File(BothLayers()), "q.safetensors", Config(), "fnv1a-0");
  EXPECT_EQ(scales.source, ScaleSource::kFile);
  for (size_t layer = 0; layer < kLayers; ++layer) {
    const formats::SideScales& k = scales.layers[layer].k;
    EXPECT_EQ(k.query->matrices(), Matrices(static_cast<float>(layer + 1)));
    EXPECT_EQ(k.mean.size(), kKvHeads * kHeadDim);
    EXPECT_EQ(scales.layers[layer].v.query, nullptr);
  }
}

TEST(QueryScaleFile, RefusesWhatIsMissingOrAnother) {
  EXPECT_EQ(FileError(BothLayers()), "no error");
  EXPECT_THAT(FileError(BothLayers(), Own(), "fnv1a-1"), HasSubstr("the file belongs to another model"));
  EXPECT_THAT(FileError(BothLayers(), json()), HasSubstr("its metadata has no key 'kvanta_kv_scales'"));
  Tensors one = BothLayers();
  one.pop_back();
  EXPECT_THAT(FileError(one), HasSubstr("layers.1.k_query is missing"));
  Tensors more = BothLayers();
  more.emplace_back("layers.2.k_query", std::vector<int64_t>{1}, std::vector<float>{1});
  EXPECT_THAT(FileError(more), HasSubstr("only 2 layers.N.k_query"));
  json own = Own();
  own["layers"]["1"].erase("k_mean");
  EXPECT_THAT(FileError(BothLayers(), own), HasSubstr("layer 1 has a k_query, but no k_mean"));
}

TEST(QueryScaleFile, RefusesMatricesThatCannotBeUsed) {
  const auto with = [](std::vector<int64_t> shape, std::vector<float> values) {
    Tensors tensors = BothLayers();
    tensors[0] = {"layers.0.k_query", std::move(shape), std::move(values)};
    return FileError(tensors);
  };
  EXPECT_THAT(with({kKvHeads, kHeadDim, kHeadDim}, Matrices(0)), HasSubstr("layers.0.k_query"));
  EXPECT_THAT(with({kKvHeads, kHeadDim, kHeadDim}, Matrices(0)), HasSubstr("KV head 0 is singular"));
  EXPECT_THAT(with({kKvHeads, kHeadDim, kHeadDim}, Matrices(NAN)), HasSubstr("not finite"));
  EXPECT_THAT(with({kKvHeads * kHeadDim, kHeadDim}, Matrices()), HasSubstr("expected F32 [2, 8, 8]"));
}

// Unit matrices, and deviations that fall from `deviation`.
std::vector<float> Eigen(float deviation = 2) {
  std::vector<float> values;
  for (int head = 0; head < kKvHeads; ++head) {
    for (int i = 0; i < kHeadDim * kHeadDim; ++i) values.push_back(i % (kHeadDim + 1) == 0 ? 1.0F : 0.0F);
    for (int i = 0; i < kHeadDim; ++i) values.push_back(i == 0 ? deviation : 1.0F / static_cast<float>(i));
  }
  return values;
}

TEST(QueryScaleFile, HasEigenChannelsOfAllLayersOrNone) {
  const auto with = [](int layers, std::vector<int64_t> shape, const std::vector<float>& values) {
    Tensors tensors = BothLayers();
    for (int layer = 0; layer < layers; ++layer) {
      tensors.emplace_back(fmt::format("layers.{}.k_eigen", layer), shape, values);
    }
    return tensors;
  };
  const std::vector<int64_t> shape = {kKvHeads, kHeadDim + 1, kHeadDim};
  const KvScales scales = ParseScaleFile(File(with(2, shape, Eigen())), "q.safetensors", Config(), "fnv1a-0");
  const formats::EigenChannels& channels = *scales.layers[1].k.eigen;
  EXPECT_EQ(channels.matrices.size(), kKvHeads * kHeadDim * kHeadDim);
  EXPECT_THAT(channels.deviations, testing::ElementsAre(2, 1, .5F, 1 / 3.F, .25F, .2F, 1 / 6.F, 1 / 7.F,  //
                                                        2, 1, .5F, 1 / 3.F, .25F, .2F, 1 / 6.F, 1 / 7.F));
  EXPECT_THAT(FileError(with(1, shape, Eigen())), HasSubstr("layers.1.k_eigen is missing; all layers have theirs"));
  EXPECT_THAT(FileError(with(2, {kKvHeads, kHeadDim, kHeadDim}, Matrices())), HasSubstr("expected F32 [2, 9, 8]"));
  for (const float wrong : {.5F, NAN, INFINITY, -1.F}) {
    EXPECT_THAT(FileError(with(2, shape, Eigen(wrong))), HasSubstr("of KV head 0: must be finite, above 0"));
  }
  std::vector<float> singular = Eigen();
  singular[0] = 0;
  EXPECT_THAT(FileError(with(2, shape, singular)), HasSubstr("KV head 0 is singular"));
  EXPECT_EQ(ParseScaleFile(File(BothLayers()), "q.safetensors", Config()).layers[0].k.eigen, nullptr);
}

TEST(QueryScaleFile, IgnoresThoseOfRecurrentLayers) {
  ModelConfig config = Config();
  config.layer_specs[0].MakeRecurrent(RecurrentKind::kGatedDeltaNet);
  Tensors all = BothLayers(), own = BothLayers();
  own.erase(own.begin());
  for (Tensors* tensors : {&all, &own}) {
    for (const int layer : {0, 1}) {
      if (layer == 0 && tensors == &own) continue;
      tensors->emplace_back(fmt::format("layers.{}.k_eigen", layer),
                            std::vector<int64_t>{kKvHeads, kHeadDim + 1, kHeadDim}, Eigen());
    }
    const KvScales scales = ParseScaleFile(File(*tensors), "q.safetensors", config);
    EXPECT_EQ(scales.layers[0].k.query, nullptr);
    EXPECT_EQ(scales.layers[0].k.eigen, nullptr);
    EXPECT_NE(scales.layers[1].k.query, nullptr);
    EXPECT_NE(scales.layers[1].k.eigen, nullptr);
  }
}

TEST(QueryScaleFile, CheckpointsHaveThemToo) {
  const weights::TempFolder folder;
  weights::SafetensorsWriter writer;
  for (const char* layer : {"0", "1"}) {
    const std::string prefix = fmt::format("model.layers.{}.self_attn.", layer);
    writer.Add(prefix + "k_mean", {kKvHeads, kHeadDim}, std::vector<float>(kKvHeads * kHeadDim, 0.25F));
    writer.Add(prefix + "k_query", {kKvHeads, kHeadDim, kHeadDim}, Matrices());
    EXPECT_TRUE(IsKvScaleTensor(prefix + "k_query")) << "no weight: left out of the model's hash";
  }
  folder.Write("model.safetensors", writer.File());
  const auto read = [&] {
    const weights::Checkpoint checkpoint = weights::Checkpoint::Open(folder.Path());
    return ReadScaleTensors(checkpoint, Config());
  };
  const KvScales scales = read();
  EXPECT_EQ(scales.layers[1].k.query->matrices(), Matrices());
  EXPECT_EQ(scales.layers[1].k.mean, std::vector<float>(kKvHeads * kHeadDim, 0.25F));
  weights::SafetensorsWriter wrong;
  wrong.Add("model.layers.0.self_attn.k_mean", {kHeadDim}, std::vector<float>(kHeadDim, 0.25F));
  folder.Write("model.safetensors", wrong.File());
  EXPECT_THAT(ErrorOf(read), HasSubstr("expected [2, 8]"));
}

}  // namespace
}  // namespace kvanta::models::query_scales
