// Nemotron-H and Nemotron 3: layers of one block each, Mamba-2, attention without rope, an MLP of squared ReLU, or
// experts of the same kind.
// transformers: models/nemotron_h/modeling_nemotron_h.py.
#include <fmt/format.h>

#include <string>
#include <vector>

#include "models/architecture.h"
#include "models/config/mamba2_config.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

// The kind of each layer: 'M' Mamba-2, '*' attention, '-' MLP, 'E' experts.
std::string ReadPattern(const JsonObject& json) {
  constexpr const char* kPattern = "hybrid_override_pattern";
  constexpr const char* kKinds[][2] = {{"linear_attention", "M"}, {"mamba", "M"}, {"full_attention", "*"},
                                       {"attention", "*"},        {"mlp", "-"},   {"moe", "E"}};
  for (const char* key : {"layer_types", "layers_block_type"}) {
    if (!json.Has(key)) continue;
    const Json& types = json.Get(key);
    std::string pattern;
    for (const Json& type : types) {
      for (const auto& [name, letter] : kKinds) {
        if (type == name) pattern += letter;
      }
    }
    if (!types.is_array() || pattern.empty() || pattern.size() != types.size()) {
      json.Fail(key, "a list of 'linear_attention', 'full_attention', 'mlp' and 'moe'");
    }
    return pattern;
  }
  std::string pattern = json.String(kPattern);
  if (pattern.empty() || pattern.size() > 4096 || pattern.find_first_not_of("M*-E") != std::string::npos) {
    json.Fail(kPattern, "a string of 'M' (Mamba-2), '*' (attention), '-' (MLP) and 'E' (experts)");
  }
  return pattern;
}

// A layer here has an MLP or experts as well, those of the next one of the checkpoint.
void JoinLayers(const JsonObject& json, const std::string& pattern, ModelConfig& config) {
  constexpr const char* kKey = "hybrid_override_pattern";
  if (pattern.find('*') == std::string::npos) json.Fail(kKey, "at least one layer of attention");
  std::vector<LayerSpec> specs;
  for (size_t layer = 0; layer < pattern.size(); ++layer) {
    const auto stored = static_cast<int>(layer);
    if (pattern[layer] == '-' || pattern[layer] == 'E') {
      if (specs.empty() || specs.back().has_mlp) json.Fail(kKey, "no MLP or experts at the start, or after others");
      specs.back().has_mlp = true;
      specs.back().moe = pattern[layer] == 'E';
      specs.back().stored_mlp = stored;
      continue;
    }
    LayerSpec& spec = specs.emplace_back();
    if (pattern[layer] == 'M') spec.MakeRecurrent(RecurrentKind::kMamba2);
    spec.has_mlp = false;
    spec.stored_attention = spec.stored_mlp = stored;
  }
  config.stored_layers = static_cast<int>(pattern.size());
  config.layers = static_cast<int>(specs.size());
  config.layer_specs = std::move(specs);
}

void ReadExperts(const JsonObject& json, ModelConfig& config) {
  kernels::MoeConfig& moe = config.moe;
  ReadSigmoidExperts(json, "n_routed_experts", "n_shared_experts", config);
  moe.gated = false;
  moe.shared_expert_intermediate_size =
      static_cast<int>(json.Int("moe_shared_expert_intermediate_size", 1, kMaxExpertWidth));
  moe.moe_latent_size = static_cast<int>(json.Int("moe_latent_size", 1, kMaxExpertWidth, 0));
}

void ReadNemotronH(const JsonObject& json, ModelConfig& config) {
  for (const auto& [key, value] : {std::pair{"mlp_hidden_act", "relu2"}, std::pair{"mamba_hidden_act", "silu"}}) {
    if (json.String(key, value) != value) json.Fail(key, value);
  }
  config.mlp.kind = MlpKind::kUngated;
  config.mlp.pointwise = kernels::Pointwise::kSquaredRelu;
  config.mlp.bias = json.Bool("mlp_bias", false);
  config.rms_eps = json.Number("layer_norm_epsilon", 0, 1);
  TensorNames& names = config.names;
  // The last one is that of GGUF files.
  names.decoders = {{"backbone.", "lm_head", "embeddings"}, {"model.", "lm_head", "embeddings"}, {"model.", "lm_head"}};
  names.pre_attention_norm = names.pre_mlp_norm = "norm";
  names.attention = names.mamba2 = names.mlp = "mixer";
  names.final_norm = "norm_f";
  ReadMamba2(json,
             {.heads = "mamba_num_heads",
              .head_dim = "mamba_head_dim",
              .groups = json.Has("mamba_n_groups") ? "mamba_n_groups" : "n_groups",
              .state_size = "ssm_state_size",
              .conv_width = json.Has("mamba_d_conv") ? "mamba_d_conv" : "conv_kernel",
              .conv_bias = json.Has("mamba_conv_bias") ? "mamba_conv_bias" : "use_conv_bias",
              .proj_bias = "use_bias"},
             0, config);
  // transformers: not time_step_limit.
  kernels::Mamba2Shape& shape = config.mamba2.shape;
  shape.min_dt = static_cast<float>(json.Number(json.Has("mamba_dt_min") ? "mamba_dt_min" : "time_step_min", 0, 1e6));
  shape.max_dt = kernels::Mamba2Shape{}.max_dt;
  const std::string pattern = ReadPattern(json);
  JoinLayers(json, pattern, config);
  if (pattern.find('E') != std::string::npos) ReadExperts(json, config);
}

// num_hidden_layers is the length of the pattern, whatever the file says.
constexpr std::string_view kNemotronHDefaults = R"({"vocab_size": 131072, "hidden_size": 4096,
  "intermediate_size": 21504, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8,
  "head_dim": 128, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 4096, "mamba_num_heads": 128,
  "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "time_step_min": 0.001,
  "eos_token_id": 2, "bos_token_id": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
  "moe_shared_expert_intermediate_size": 7688})";

}  // namespace

extern const Architecture kNemotronH = {.name = "NemotronHForCausalLM",
                                        .model_type = "nemotron_h",
                                        .read_config = ReadNemotronH,
                                        .defaults = kNemotronHDefaults,
                                        .reads_activation = true};

}  // namespace kvanta::models
