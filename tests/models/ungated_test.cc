// Configs of StarCoder2, Phi-2, GPT-NeoX, GPT-2, OPT, Apertus, Falcon, InternLM2, MiniCPM and ChatGLM.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "models/config/config.h"
#include "models/config_json.h"

namespace kvanta::models::ungated_test {
namespace {

using kernels::Pointwise;
using nlohmann::json;

json Base(const char* architecture, const char* model_type) {
  json config = json::parse(R"({"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "vocab_size": 100, "torch_dtype": "bfloat16"})");
  config["architectures"] = {architecture};
  config["model_type"] = model_type;
  return config;
}

TEST(Starcoder2Config, Activations) {
  const json base = Base("Starcoder2ForCausalLM", "starcoder2");
  EXPECT_EQ(Parse(base).mlp.pointwise, Pointwise::kGeluTanh);
  EXPECT_TRUE(Parse(base).mlp.kind == MlpKind::kUngated && Parse(base).qkv_bias && Parse(base).tied_embeddings);
  const std::pair<const char*, Pointwise> known[] = {{"gelu", Pointwise::kGelu},
                                                     {"gelu_new", Pointwise::kGeluTanh},
                                                     {"gelu_fast", Pointwise::kGeluTanh},
                                                     {"relu", Pointwise::kRelu},
                                                     {"relu2", Pointwise::kSquaredRelu}};
  for (const auto& [name, activation] : known) {
    EXPECT_EQ(Parse(With(base, "hidden_act", name)).mlp.pointwise, activation) << name;
  }
  ExpectRefused(With(base, "hidden_act", "quick_gelu"), "'hidden_act' is 'quick_gelu'; expected gelu, gelu_new");
  EXPECT_EQ(Parse(With(base, "sliding_window", 32)).SlidingWindows().front(), 32);
}

TEST(PhiConfig, SideBySide) {
  const json base = Base("PhiForCausalLM", "phi");
  const ModelConfig config = Parse(base);
  EXPECT_TRUE(config.parallel_blocks && config.lm_head_bias && config.names.pre_mlp_norm.empty());
  EXPECT_EQ(config.layer_specs[0].rope.rotary_dim, 8) << "the class's default";
  ExpectRefused(With(base, "qk_layernorm", true), "'qk_layernorm' is true");
}

TEST(GptNeoxConfig, OwnNamesOfRopeKeys) {
  const json base = Base("GPTNeoXForCausalLM", "gpt_neox");
  const ModelConfig config = Parse(With(With(base, "rotary_pct", 0.5), "rotary_emb_base", 500));
  EXPECT_EQ(config.layer_specs[0].rope.rotary_dim, 8);
  EXPECT_EQ(config.layer_specs[0].rope.theta, 500);
  EXPECT_EQ(Parse(base).layer_specs[0].rope.rotary_dim, 4) << "the class's default";
  EXPECT_TRUE(config.parallel_blocks && !config.names.pre_mlp_norm.empty()) << "each block has a norm";
  EXPECT_EQ(config.qkv_layout, QkvLayout::kByKvHead);
  EXPECT_EQ(Parse(With(base, "num_key_value_heads", 2)).kv_heads, 4) << "the class has no such key";
}

TEST(Gpt2Config, OwnNamesOfKeys) {
  json base = json::parse(R"({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 96, "n_head": 4,
    "n_layer": 3, "n_positions": 200, "vocab_size": 100, "n_inner": null})");
  const ModelConfig config = Parse(base);
  EXPECT_EQ(config.hidden, 96);
  EXPECT_EQ(config.heads, 4);
  EXPECT_EQ(config.layers, 3);
  EXPECT_EQ(config.max_position, 200);
  EXPECT_EQ(config.intermediate_size, 384) << "four times the channels";
  EXPECT_EQ(config.layer_specs[0].rope.rotary_dim, 0);
  EXPECT_EQ(config.names.positions, "wpe");
  EXPECT_EQ(Parse(With(base, "n_inner", 128)).intermediate_size, 128);
  EXPECT_EQ(Parse(With(base, "architectures", {"GPT2Model"})).architecture, "GPT2LMHeadModel");
  ExpectRefused(With(base, "scale_attn_by_inverse_layer_idx", true), "'scale_attn_by_inverse_layer_idx' is true");
  ExpectRefused(With(base, "scale_attn_weights", false), "'scale_attn_weights' is false");
  ExpectRefused(With(base, "add_cross_attention", true), "'add_cross_attention' is true");
  ExpectRefused(With(base, "activation_function", "silu"), "'activation_function' is 'silu'");
}

TEST(OptConfig, PositionsWithAnOffset) {
  const json base = With(Base("OPTForCausalLM", "opt"), "ffn_dim", 128);
  const ModelConfig config = Parse(base);
  EXPECT_EQ(config.position_offset, 2);
  EXPECT_EQ(config.mlp.pointwise, Pointwise::kRelu);
  EXPECT_EQ(config.intermediate_size, 128);
  ExpectRefused(With(base, "do_layer_norm_before", false), "'do_layer_norm_before' is false; expected true");
  ExpectRefused(With(base, "word_embed_proj_dim", 32), "'word_embed_proj_dim' is 32; expected hidden_size");
  ExpectRefused(With(base, "_remove_final_layer_norm", true), "'_remove_final_layer_norm' is true");
}

TEST(ApertusConfig, Xielu) {
  const ModelConfig config = Parse(Base("ApertusForCausalLM", "apertus"));
  EXPECT_EQ(config.mlp.pointwise, Pointwise::kXielu);
  EXPECT_EQ(config.qk_norm, QkNorm::kPerHead);
  EXPECT_EQ(config.layer_specs[0].rope.type, RopeType::kLlama3);
  EXPECT_EQ(config.layer_specs[0].rope.theta, 12e6);
}

TEST(FalconConfig, GroupsOfHeads) {
  const json base = Base("FalconForCausalLM", "falcon");
  EXPECT_EQ(Parse(base).kv_heads, 1);
  EXPECT_EQ(Parse(base).names.pre_mlp_norm, "");
  EXPECT_EQ(Parse(base).intermediate_size, 256);
  EXPECT_EQ(Parse(With(base, "multi_query", false)).kv_heads, 4);
  json grouped = With(With(base, "new_decoder_architecture", true), "num_kv_heads", 2);
  EXPECT_EQ(Parse(grouped).kv_heads, 2);
  EXPECT_EQ(Parse(grouped).names.pre_mlp_norm, "ln_mlp");
  EXPECT_EQ(Parse(With(grouped, "num_ln_in_parallel_attn", 1)).names.pre_mlp_norm, "");
  ExpectRefused(With(base, "alibi", true), "'alibi' is true; expected false");
  ExpectRefused(With(grouped, "parallel_attn", false), "'parallel_attn' is false");
}

TEST(MiniCpmConfig, Factors) {
  json base = With(Base("MiniCPMForCausalLM", "minicpm"), "intermediate_size", 128);
  base.update({{"scale_emb", 12}, {"scale_depth", 1.4}, {"dim_model_base", 16}});
  const ModelConfig config = Parse(base);
  EXPECT_EQ(config.embedding_scale, 12);
  EXPECT_DOUBLE_EQ(config.residual_scale, 0.7);
  EXPECT_EQ(config.logits_divisor, 4);
  ExpectRefused(With(base, "sparse_config", {{"topk", 64}}), "'sparse_config'");
  ExpectRefused(With(base, "num_experts", 8), "'num_experts' is 8");
}

TEST(ChatGlmConfig, OwnNamesOfKeys) {
  const json base = json::parse(R"({"architectures": ["ChatGLMModel"], "model_type": "chatglm", "num_layers": 3,
    "hidden_size": 64, "ffn_hidden_size": 96, "kv_channels": 16, "multi_query_group_num": 2, "num_attention_heads": 4,
    "padded_vocab_size": 100, "seq_length": 512, "layernorm_epsilon": 1e-5, "add_qkv_bias": true, "rope_ratio": 50})");
  const ModelConfig config = Parse(base);
  EXPECT_EQ(config.architecture, "ChatGLMForConditionalGeneration");
  EXPECT_EQ(config.layers, 3);
  EXPECT_EQ(config.kv_heads, 2);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.max_position, 512);
  EXPECT_EQ(config.layer_specs[0].rope.rotary_dim, 8);
  EXPECT_EQ(config.layer_specs[0].rope.theta, 5e5);
  EXPECT_TRUE(config.qkv_bias && config.layer_specs[0].rope.interleaved);
  for (const char* key : {"add_bias_linear", "apply_residual_connection_post_layernorm"}) {
    ExpectRefused(With(base, key, true), key);
  }
  for (const char* key : {"rmsnorm", "post_layer_norm", "original_rope"}) ExpectRefused(With(base, key, false), key);
}

TEST(InternLm2Config, Layout) {
  const ModelConfig config = Parse(With(Base("InternLM2ForCausalLM", "internlm2"), "num_key_value_heads", 2));
  EXPECT_EQ(config.qkv_layout, QkvLayout::kByKvHead);
  EXPECT_TRUE(config.qkv_bias && config.o_bias) << "the class's default";
}

}  // namespace
}  // namespace kvanta::models::ungated_test
