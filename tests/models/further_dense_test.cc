// Configs of Gemma, Seed-OSS, ERNIE 4.5, EXAONE 4, Hunyuan, CWM, Youtu, HyperCLOVA X, the Qwen-VL models, Command R,
// Arcee, Nemotron and StableLM.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>

#include "models/config/config.h"
#include "models/config_json.h"

namespace kvanta::models::further_dense_test {
namespace {

using nlohmann::json;
using testing::ElementsAre;

json Base(const char* architecture, const char* model_type) {
  json config = json::parse(R"({"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 100,
    "max_position_embeddings": 512, "torch_dtype": "bfloat16", "eos_token_id": 2, "bos_token_id": 1})");
  config["architectures"] = {architecture};
  config["model_type"] = model_type;
  return config;
}

std::vector<int> RotaryDims(const ModelConfig& config) {
  std::vector<int> dims;
  for (const LayerSpec& layer : config.layer_specs) dims.push_back(layer.rope.rotary_dim);
  return dims;
}

TEST(GemmaConfig, FirstOfItsFamily) {
  const json base = Base("GemmaForCausalLM", "gemma");
  const ModelConfig config = Parse(base);
  EXPECT_EQ(config.mlp.activation, kernels::Activation::kGeluTanh);
  EXPECT_EQ(config.norm_weight_offset, 1);
  EXPECT_EQ(config.embedding_scale, 8);
  EXPECT_EQ(config.softmax_scale, 0.25);
  EXPECT_EQ(config.names.pre_mlp_norm, "post_attention_layernorm");
  EXPECT_EQ(config.names.post_mlp_norm, "");
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_EQ(Parse(With(base, "hidden_act", "gelu")).mlp.activation, kernels::Activation::kGeluTanh);
  ExpectRefused(With(Base("LlamaForCausalLM", "llama"), "hidden_act", "gelu"), "'hidden_act' is 'gelu'");
  ExpectRefused(With(base, "use_bidirectional_attention", true), "'use_bidirectional_attention' is true");
}

TEST(SeedOssConfig, Biases) {
  const json base = Base("SeedOssForCausalLM", "seed_oss");
  const ModelConfig config = Parse(base);
  EXPECT_TRUE(config.qkv_bias && !config.o_bias && !config.mlp.bias) << "the class's defaults";
  EXPECT_TRUE(Parse(With(base, "attention_out_bias", true)).o_bias);
}

TEST(Ernie45Config, PairsOfNeighbours) {
  const ModelConfig config = Parse(Base("Ernie4_5ForCausalLM", "ernie4_5"));
  EXPECT_TRUE(config.layer_specs[0].rope.interleaved);
  EXPECT_EQ(config.layer_specs[0].rope.theta, 5e5);
}

TEST(Exaone4Config, RopeInLayersWithAWindow) {
  json config = With(Base("Exaone4ForCausalLM", "exaone4"), "sliding_window", 32);
  EXPECT_THAT(Parse(config).SlidingWindows(), ElementsAre(32, 32, 32, 0, 32)) << "the class's pattern";
  EXPECT_THAT(RotaryDims(Parse(config)), ElementsAre(16, 16, 16, 0, 16));
  EXPECT_THAT(Parse(With(config, "sliding_window_pattern", 2)).SlidingWindows(), ElementsAre(32, 0, 32, 0, 32));
  ExpectRefused(With(config, "sliding_window_pattern", "LLLG"), "'sliding_window_pattern' is 'LLLG'");
  json layers = With(config, "sliding_window_pattern", "LLLG");
  layers["layer_types"] =
      json::array({"full_attention", "sliding_attention", "full_attention", "full_attention", "full_attention"});
  EXPECT_THAT(RotaryDims(Parse(layers)), ElementsAre(0, 16, 0, 0, 0));
  const ModelConfig small = Parse(With(config, "sliding_window", nullptr));
  EXPECT_THAT(small.SlidingWindows(), ElementsAre(0, 0, 0, 0, 0));
  EXPECT_THAT(RotaryDims(small), ElementsAre(16, 16, 16, 16, 16)) << "of models without windows";
  ExpectRefused(With(layers, "sliding_window", nullptr), "no 'sliding_attention' where");
}

TEST(HunYuanConfig, AlphaStretchesTheBase) {
  json config = Base("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense");
  EXPECT_EQ(Parse(config).qk_norm, QkNorm::kPerHeadAfterRope);
  EXPECT_EQ(Parse(config).names.q_norm, "query_layernorm");
  config["rope_scaling"] = {{"type", "dynamic"}, {"factor", 1.0}, {"alpha", 1000.0}};
  const RopeSpec rope = Parse(config).layer_specs[0].rope;
  EXPECT_EQ(rope.type, RopeType::kDefault);
  EXPECT_DOUBLE_EQ(rope.theta, 1e4 * std::pow(1000.0, 16.0 / 14.0));
  config["rope_scaling"]["alpha"] = 0;
  EXPECT_EQ(Parse(config).layer_specs[0].rope.theta, 1e4) << "none, as in transformers";
  config["rope_scaling"]["alpha"] = -1;
  ExpectRefused(config, "'rope_scaling.alpha' is -1");
}

TEST(CwmConfig, FullAttentionFromTheFirstLayerOn) {
  const ModelConfig config = Parse(Base("CwmForCausalLM", "cwm"));
  EXPECT_THAT(config.SlidingWindows(), ElementsAre(0, 8192, 8192, 8192, 0));
  const RopeSpec& rope = config.layer_specs[0].rope;
  EXPECT_EQ(rope.type, RopeType::kLlama3);
  EXPECT_EQ(rope.factor, 16);
  EXPECT_EQ(rope.theta, 1e6);
  ExpectRefused(With(Base("CwmForCausalLM", "cwm"), "sliding_window", nullptr), "'sliding_window' is missing");
}

TEST(YoutuConfig, LatentsWithoutExperts) {
  const json base = Base("YoutuForCausalLM", "youtu");
  const ModelConfig config = Parse(base);
  EXPECT_TRUE(config.UsesMla() && config.mla.rope_interleave && config.tied_embeddings);
  EXPECT_EQ(config.mla.kv_lora_rank, 512);
  EXPECT_EQ(config.mla.q_lora_rank, 1536);
  EXPECT_FALSE(config.layer_specs[0].moe);
  EXPECT_EQ(Parse(With(base, "q_lora_rank", nullptr)).mla.q_lora_rank, 0);
}

TEST(HyperClovaXConfig, FactorsAndNorms) {
  json config = Base("HyperCLOVAXForCausalLM", "hyperclovax");
  EXPECT_EQ(Parse(config).softmax_scale, 0.25) << "unlike Granite's default";
  EXPECT_EQ(Parse(config).names.post_attention_norm, "post_norm1");
  EXPECT_EQ(Parse(With(config, "use_post_norm", false)).names.post_mlp_norm, "");
  config.update({{"attention_multiplier", 0.5}, {"logits_scaling", 0.125}, {"embedding_multiplier", 10.0}});
  EXPECT_EQ(Parse(config).softmax_scale, 0.5);
  EXPECT_EQ(Parse(config).logits_divisor, 8);
  EXPECT_EQ(Parse(config).embedding_scale, 10);
  ExpectRefused(With(config, "logits_scaling", 0), "'logits_scaling' is 0");
}

TEST(CohereConfig, ParallelBlocksAndLayerNorm) {
  const json base = Base("CohereForCausalLM", "cohere");
  const ModelConfig config = Parse(base);
  EXPECT_TRUE(config.norm == NormKind::kLayer && config.parallel_blocks && config.tied_embeddings);
  EXPECT_EQ(config.rms_eps, 1e-5);
  EXPECT_EQ(config.logits_divisor, 16);
  EXPECT_EQ(config.names.pre_mlp_norm, "");
  EXPECT_TRUE(config.layer_specs[0].rope.interleaved);
  EXPECT_EQ(config.qk_norm, QkNorm::kNone);
  EXPECT_EQ(Parse(With(base, "use_qk_norm", true)).qk_norm, QkNorm::kOwnWeights);
  EXPECT_EQ(config.max_position, 512);
  EXPECT_EQ(Parse(With(base, "model_max_length", 2048)).max_position, 2048) << "of the first Command R";
  ExpectRefused(With(base, "logit_scale", 0), "'logit_scale' is 0");
  json later = Base("Cohere2ForCausalLM", "cohere2");
  EXPECT_THAT(Parse(later).SlidingWindows(), ElementsAre(4096, 4096, 4096, 0, 4096));
  EXPECT_THAT(RotaryDims(Parse(later)), ElementsAre(16, 16, 16, 0, 16));
  EXPECT_THAT(RotaryDims(Parse(With(later, "sliding_window_pattern", 2))), ElementsAre(16, 0, 16, 0, 16));
  ExpectRefused(With(later, "sliding_window", nullptr), "'sliding_window' is missing");
}

TEST(NemotronConfig, SquaredRelu) {
  const json arcee = Base("ArceeForCausalLM", "arcee"), nemotron = Base("NemotronForCausalLM", "nemotron");
  EXPECT_TRUE(Parse(arcee).mlp.kind == MlpKind::kUngated && Parse(arcee).norm == NormKind::kRms);
  for (const json& base : {arcee, nemotron}) {
    EXPECT_EQ(Parse(base).mlp.pointwise, kernels::Pointwise::kSquaredRelu) << "the class's default";
  }
  const ModelConfig config = Parse(nemotron);
  EXPECT_TRUE(config.mlp.kind == MlpKind::kUngated && config.norm == NormKind::kLayerWithBias);
  EXPECT_EQ(config.norm_weight_offset, 1);
  EXPECT_EQ(config.layer_specs[0].rope.rotary_dim, 8) << "the class's default";
  for (const json& base : {arcee, nemotron}) ExpectRefused(With(base, "hidden_act", "silu"), "expected gelu, gelu_new");
}

TEST(StableLmConfig, BlocksOneAfterTheOtherOrSideBySide) {
  const json base = Base("StableLmForCausalLM", "stablelm");
  const ModelConfig config = Parse(base), parallel = Parse(With(base, "use_parallel_residual", true));
  EXPECT_TRUE(config.norm == NormKind::kLayerWithBias && !config.qkv_bias && !config.parallel_blocks);
  EXPECT_EQ(config.layer_specs[0].rope.rotary_dim, 4) << "the class's default";
  EXPECT_EQ(config.names.pre_mlp_norm, "post_attention_layernorm");
  EXPECT_TRUE(parallel.parallel_blocks);
  EXPECT_EQ(parallel.names.pre_mlp_norm, "");
  ExpectRefused(With(base, "qk_layernorm", true), "'qk_layernorm' is true");
}

TEST(QwenVlConfig, KeysInATextConfigOrAtTheTop) {
  json text = Base("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text");
  text["rope_scaling"] = {{"type", "mrope"}, {"mrope_section", {4, 2, 2}}};
  json flat = With(text, "model_type", "qwen2_5_vl");
  text.erase("architectures");
  const json nested = {
      {"architectures", {"Qwen2_5_VLForConditionalGeneration"}}, {"model_type", "qwen2_5_vl"}, {"text_config", text}};
  for (const json& config : {flat, nested}) {
    const ModelConfig parsed = Parse(config);
    EXPECT_EQ(parsed.heads, 4);
    EXPECT_TRUE(parsed.qkv_bias);
    EXPECT_EQ(parsed.layer_specs[0].rope.type, RopeType::kDefault);
    EXPECT_EQ(parsed.layer_specs[0].rope.theta, 1e6);
    EXPECT_DOUBLE_EQ(parsed.rms_eps, 1e-5);
  }
  ExpectRefused(With(flat, "hidden_act", "relu"), "key 'hidden_act' is 'relu'");
  ExpectRefused(With(nested, "text_config", With(text, "hidden_act", "relu")),
                "key 'text_config.hidden_act' is 'relu'");
  const json mrope = {{"type", "mrope"}};
  const ModelConfig text_class = Parse(With(Base("Qwen2ForCausalLM", "qwen2"), "rope_scaling", mrope));
  EXPECT_EQ(text_class.layer_specs[0].rope.type, RopeType::kDefault);  // a language model that was taken out
}

TEST(QwenVlConfig, Qwen3) {
  json text = Base("", "qwen3_vl_text");
  text.erase("architectures");
  const json config = {
      {"architectures", {"Qwen3VLForConditionalGeneration"}}, {"model_type", "qwen3_vl"}, {"text_config", text}};
  const ModelConfig parsed = Parse(config);
  EXPECT_TRUE(parsed.qk_norm == QkNorm::kPerHead && !parsed.qkv_bias);
  EXPECT_EQ(parsed.layer_specs[0].rope.theta, 5e5);
  json flat = config;
  flat.erase("text_config");
  ExpectRefused(flat, "text_config");
}

}  // namespace
}  // namespace kvanta::models::further_dense_test
