// A random tiny Llama in a folder of its own, large enough for every format: heads of 32, two layers. Or a tiny
// DeepSeek V2, for the formats of latents.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "formats/format.h"
#include "normal_floats.h"
#include "weights/safetensors_bytes.h"
#include "weights/temp_folder.h"

namespace kvanta::engine {

struct TinyShape {
  int vocab = 96;
  int hidden = 64;
  int heads = 4;
  int kv_heads = 2;
  int head_dim = 32;
  int intermediate_size = 64;
  int layers = 2;
  int max_position = 512;
  int sliding_window = 0;
  int full_layers = 0;  // with a sliding window: the first layers, which have none
  int rank = 0;         // above 0: latents of this many channels, and rope_dim rotated ones
  int rope_dim = 16;
  int experts = 0;        // above 0, with latents: of all layers but the first; two take a row, one more takes all
  float key_gain = 2.0F;  // with a gain, so that attention is not nearly uniform
  float value_gain = 1.0F;
  std::string extra = {};  // more lines of config.json, each beginning with a comma
};

class TinyModel {
 public:
  // overflowing_head: the value of all weights of token 0 in the head; 0: random like the others.
  explicit TinyModel(const TinyShape& shape = {}, float overflowing_head = 0.0F) {
    std::mt19937 random(17);
    weights::SafetensorsWriter writer;
    const auto add = [&](const std::string& name, int64_t out, int64_t in, float gain) {
      NormalFloats normal(0, gain / std::sqrt(static_cast<float>(in)));
      std::vector<float> values(static_cast<size_t>(out * in));
      for (float& x : values) x = normal(random);
      if (overflowing_head != 0 && name == "lm_head.weight") std::fill_n(values.begin(), in, overflowing_head);
      writer.Add(name, {out, in}, values);
    };
    const auto ones = [&](const std::string& name) {
      writer.Add(name, {shape.hidden}, std::vector<float>(static_cast<size_t>(shape.hidden), 1.0F));
    };
    add("model.embed_tokens.weight", shape.vocab, shape.hidden, std::sqrt(static_cast<float>(shape.hidden)));
    for (int layer = 0; layer < shape.layers; ++layer) {
      const std::string prefix = fmt::format("model.layers.{}.", layer);
      ones(prefix + "input_layernorm.weight");
      ones(prefix + "post_attention_layernorm.weight");
      if (shape.rank != 0) {
        add(prefix + "self_attn.q_proj.weight", shape.heads * (shape.head_dim + shape.rope_dim), shape.hidden, 2.0F);
        add(prefix + "self_attn.kv_a_proj_with_mqa.weight", shape.rank + shape.rope_dim, shape.hidden, shape.key_gain);
        writer.Add(prefix + "self_attn.kv_a_layernorm.weight", {shape.rank},
                   std::vector<float>(static_cast<size_t>(shape.rank), 1.0F));
        add(prefix + "self_attn.kv_b_proj.weight", shape.heads * 2 * shape.head_dim, shape.rank, 1.0F);
      } else {
        add(prefix + "self_attn.q_proj.weight", shape.heads * shape.head_dim, shape.hidden, 2.0F);
        add(prefix + "self_attn.k_proj.weight", shape.kv_heads * shape.head_dim, shape.hidden, shape.key_gain);
        add(prefix + "self_attn.v_proj.weight", shape.kv_heads * shape.head_dim, shape.hidden, shape.value_gain);
        for (const char* norm : {"q_norm", "k_norm"}) {
          if (shape.full_layers == 0) break;
          writer.Add(fmt::format("{}self_attn.{}.weight", prefix, norm), {shape.head_dim},
                     std::vector<float>(static_cast<size_t>(shape.head_dim), 1.5F));
        }
      }
      add(prefix + "self_attn.o_proj.weight", shape.hidden, shape.heads * shape.head_dim, 2.0F);
      const auto mlp = [&](const std::string& name) {
        add(name + "gate_proj.weight", shape.intermediate_size, shape.hidden, 1.0F);
        add(name + "up_proj.weight", shape.intermediate_size, shape.hidden, 1.0F);
        add(name + "down_proj.weight", shape.hidden, shape.intermediate_size, 1.0F);
      };
      if (shape.experts == 0 || layer == 0) {
        mlp(prefix + "mlp.");
        continue;
      }
      add(prefix + "mlp.gate.weight", shape.experts, shape.hidden, 4.0F);
      for (int expert = 0; expert < shape.experts; ++expert) mlp(fmt::format("{}mlp.experts.{}.", prefix, expert));
      mlp(prefix + "mlp.shared_experts.");
    }
    ones("model.norm.weight");
    add("lm_head.weight", shape.vocab, shape.hidden, 3.0F);
    folder_.Write("model.safetensors", writer.File());
    folder_.Write("config.json", Config(shape));
  }

  std::string Path() const { return folder_.Path(); }

 private:
  static std::string Config(const TinyShape& shape) {
    std::string more;
    if (shape.sliding_window != 0) more = fmt::format(", \"sliding_window\": {}", shape.sliding_window);
    if (shape.full_layers != 0) {
      more += fmt::format(", \"use_sliding_window\": true, \"max_window_layers\": {}", shape.full_layers);
    }
    if (shape.rank != 0) {
      more = fmt::format(
          R"(, "kv_lora_rank": {}, "q_lora_rank": null, "qk_nope_head_dim": {}, "qk_rope_head_dim": {}, "v_head_dim": {})",
          shape.rank, shape.head_dim, shape.rope_dim, shape.head_dim);
      if (shape.experts == 0) more += R"(, "n_routed_experts": null)";  // absent, it would be the class's default
    }
    if (shape.experts != 0) {
      more += fmt::format(
          R"(, "n_routed_experts": {}, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": {},
"first_k_dense_replace": 1)",
          shape.experts, shape.intermediate_size);
    }
    const std::pair<const char*, const char*> name = shape.rank != 0 ? std::pair{"DeepseekV2ForCausalLM", "deepseek_v2"}
                                                     : shape.full_layers != 0 ? std::pair{"Qwen3ForCausalLM", "qwen3"}
                                                     : shape.sliding_window != 0
                                                         ? std::pair{"MistralForCausalLM", "mistral"}
                                                         : std::pair{"LlamaForCausalLM", "llama"};
    return fmt::format(
        R"({{"architectures": ["{}"], "model_type": "{}", "vocab_size": {}, "hidden_size": {},
"intermediate_size": {}, "num_hidden_layers": {}, "num_attention_heads": {}, "num_key_value_heads": {},
"head_dim": {}, "max_position_embeddings": {}, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
"tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32"{}{}}})",
        name.first, name.second, shape.vocab, shape.hidden, shape.intermediate_size, shape.layers, shape.heads,
        shape.kv_heads, shape.head_dim, shape.max_position, more, shape.extra);
  }

  weights::TempFolder folder_;
};

inline const TinyModel& Model() {
  static const TinyModel model;
  return model;
}

inline const TinyModel& LatentModel() {
  static const TinyModel model({.rank = 64});
  return model;
}
// A model that takes the scheme.
inline const TinyModel& ModelFor(const std::string& scheme) {
  const bool latents = formats::Find(KvScheme::Parse(scheme).k.format).latents == formats::MlaSupport::kRequired;
  return latents ? LatentModel() : Model();
}

inline std::vector<int32_t> RandomTokens(std::mt19937_64& random, int64_t count, int vocab = 96) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab));
  return tokens;
}

}  // namespace kvanta::engine
