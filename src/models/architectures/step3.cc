// Step 3.5, and the language model of Step 3.7: windows with more query heads in three of four layers, a gate of each
// head's output, a rope of each kind of layer; experts by sigmoid scores with a shared one, and limits of gated
// activations in some layers; norm weights around zero. transformers: models/step3p7/modeling_step3p7.py.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <vector>

#include "kvanta/error.h"
#include "models/architecture.h"
#include "models/config/moe_config.h"
#include "models/config/rope_config.h"

namespace kvanta::models {
namespace {

constexpr const char* kSliding = "sliding_attention";
constexpr const char* kFull = "full_attention";

void RenameStepKeys(Json& keys) {
  RenameKey(keys, "num_attention_groups", "num_key_value_heads");
  RenameKey(keys, "moe_num_experts", "n_routed_experts");
  RenameKey(keys, "moe_top_k", "num_experts_per_tok");
  RenameKey(keys, "share_expert_dims", "share_expert_dim");
  RenameKey(keys, "num_mtp_layers", "num_nextn_predict_layers");
}

// The keys, whose lists by layer end with the model's last layer: published ones have layers that predict further
// tokens, too.
Json WithoutPredictedLayers(const JsonObject& json, const ModelConfig& config) {
  Json keys = json.Value();
  for (const char* key : {"layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta",
                          "partial_rotary_factors", "use_rope_layers"}) {
    if (!keys.contains(key) || !keys[key].is_array() || keys[key].empty()) continue;
    Json& list = keys[key];
    const auto layers = static_cast<size_t>(config.layers);
    if (list.size() != layers && list.size() != layers + static_cast<size_t>(config.num_nextn_predict_layers)) {
      json.Fail(key, fmt::format("a list with one entry for each of {} layers", config.layers));
    }
    list.erase(list.begin() + config.layers, list.end());
  }
  return keys;
}

// Keys of StepFun's own code that transformers does not read: what its class computes.
void CheckStepKeys(const JsonObject& json) {
  for (const char* key : {"use_qk_norm", "zero_centered", "norm_expert_weight", "use_head_wise_attn_gate", "use_moe"}) {
    if (!json.Bool(key, true)) json.Fail(key, "true");
  }
  for (const char* key : {"sink", "use_mfa", "use_bidirectional_attention"}) {
    if (json.Bool(key, false)) json.Fail(key, "false");
  }
  if (json.String("moe_router_activation", "sigmoid") != "sigmoid") json.Fail("moe_router_activation", "sigmoid");
  const Json* gating = json.Find("gating");
  if (gating != nullptr && *gating != true && *gating != "per-head") json.Fail("gating", "true, or per-head");
  const Json* ropes = json.Find("use_rope_layers");
  const auto is_used = [](const Json& layer) { return layer.is_boolean() ? layer.get<bool>() : layer == 1; };
  if (ropes != nullptr && (!ropes->is_array() || !std::ranges::all_of(*ropes, is_used))) {
    json.Fail("use_rope_layers", "an empty list, or true for each layer");
  }
}

// Query heads of layers with a window.
int ReadSlidingHeads(const JsonObject& json, const ModelConfig& config) {
  constexpr const char* kHeads = "num_sliding_attention_heads";
  constexpr const char* kOther = "attention_other_setting";
  if (json.Has(kHeads)) return static_cast<int>(json.Int(kHeads, 1, 65536));
  if (!json.Has(kOther)) return config.heads;
  const JsonObject other = json.Object(kOther);
  const auto check = [&](const char* key, int expected) {
    if (other.Int(key, 1, 65536, expected) != expected) other.Fail(key, fmt::format("{}", expected));
  };
  check("num_attention_groups", config.kv_heads);
  check("head_dim", config.head_dim);
  check("true_head_dim", config.head_dim);
  if (other.String("attention_type", kSliding) != kSliding) other.Fail("attention_type", kSliding);
  return static_cast<int>(other.Int("num_attention_heads", 1, 65536, config.heads));
}

void ReadStepHeads(const JsonObject& json, ModelConfig& config) {
  const int sliding = ReadSlidingHeads(json, config);
  if (sliding % config.kv_heads != 0) {
    throw InputError(
        fmt::format("{}: {} heads of layers with a window; expected a multiple of num_key_value_heads ({})",
                    json.File(), sliding, config.kv_heads));
  }
  Json by_layer = Json::object();  // as transformers saves the same
  for (size_t i = 0; i < config.layer_specs.size(); ++i) {
    LayerSpec& layer = config.layer_specs[i];
    if (layer.visibility.IsFull()) continue;
    layer.heads = sliding;
    if (sliding != config.heads) by_layer[std::to_string(i)] = {{"num_attention_heads", sliding}};
  }
  constexpr const char* kByLayer = "per_layer_config";
  if (json.Has(kByLayer) && json.Get(kByLayer) != by_layer) {
    json.Fail(kByLayer, "num_attention_heads of the layers with a window alone, as num_sliding_attention_heads says");
  }
}

// rope_parameters by layer type; or lists of bases and of rotated parts, and the scaling of layers of full attention.
void ReadStepRopes(const JsonObject& json, ModelConfig& config) {
  config.max_position = ReadMaxPosition(json);  // scaling is included
  constexpr const char* kTheta = "rope_theta";
  constexpr const char* kPartial = "partial_rotary_factors";
  constexpr const char* kScaled = "yarn_only_types";
  const bool by_type = HasRopesByLayerType(json);
  const bool has_scaling = json.Has("rope_scaling") && !json.Object("rope_scaling").Value().empty();
  if (!by_type && has_scaling && json.Has(kScaled) && json.Get(kScaled) != Json::array({kFull})) {
    json.Fail(kScaled, fmt::format("['{}']", kFull));
  }
  const auto of_layer = [&](const char* key, size_t layer, Json missing) {
    if (!json.Has(key) || (json.Get(key).is_array() && json.Get(key).empty())) return missing;
    return json.Get(key).is_array() ? json.Get(key)[layer] : json.Get(key);
  };
  for (size_t i = 0; i < config.layer_specs.size(); ++i) {
    LayerSpec& layer = config.layer_specs[i];
    const char* type = layer.visibility.IsFull() ? kFull : kSliding;
    if (by_type) {
      layer.rope = ReadRopeOfLayers(json, type, config.head_dim, config.max_position, kDefaultTheta, 1);
      continue;
    }
    Json rope = has_scaling && layer.visibility.IsFull() ? json.Get("rope_scaling") : Json::object();
    rope[kTheta] = of_layer(kTheta, i, kDefaultTheta);
    rope["partial_rotary_factor"] = of_layer(kPartial, i, 1.0);
    layer.rope =
        ReadRopeParameters(JsonObject(rope, json.File()), config.head_dim, config.max_position, kDefaultTheta, 1);
  }
}

// Numbers of the layers of experts, in moe_layers_enum: a list, or a text with commas.
std::vector<int> ReadExpertLayers(const JsonObject& json) {
  constexpr const char* kKey = "moe_layers_enum";
  const Json& value = json.Get(kKey);
  std::vector<int> layers;
  const auto fail = [&] { json.Fail(kKey, "numbers of layers, a list or a text with commas"); };
  if (value.is_array()) {
    for (const Json& layer : value) {
      if (!layer.is_number_unsigned() || layer.get<uint64_t>() > 4096) fail();
      layers.push_back(layer.get<int>());
    }
    return layers;
  }
  const std::string text = json.String(kKey);
  for (const char *at = text.data(), *end = at + text.size(); at < end;) {
    int layer = 0;
    const auto [next, error] = std::from_chars(at, end, layer);
    if (error != std::errc() || layer < 0 || (next != end && *next != ',')) fail();
    layers.push_back(layer);
    at = next == end ? end : next + 1;
  }
  return layers;
}

void ReadStepExperts(const JsonObject& json, ModelConfig& config) {
  constexpr int kFirstSparse = 3;
  if (json.Has("mlp_layer_types") || !json.Has("moe_layers_enum")) {
    ReadMlpLayerTypes(json, kFirstSparse, config);
  } else {
    for (const int layer : ReadExpertLayers(json)) {
      if (layer < config.layers) config.layer_specs[static_cast<size_t>(layer)].moe = true;
    }
  }
  kernels::MoeConfig& moe = config.moe;
  ReadExpertCounts(json, "n_routed_experts", "moe_intermediate_size", config);
  moe.shared_expert_intermediate_size = static_cast<int>(json.Int("share_expert_dim", 1, kMaxExpertWidth));
  moe.scoring_func = kernels::ScoringFunc::kSigmoid;
  moe.has_correction_bias = json.Bool("use_moe_router_bias", true);
  moe.norm_topk_prob = true;
  moe.routed_scaling_factor = static_cast<float>(json.Number("moe_router_scaling_factor", 0, 1e6, 1));
  TensorNames& names = config.names;
  names.sparse_mlp = "moe";
  names.stacked_experts = true;
  names.correction_bias = "router_bias";
  names.shared_expert = "share_expert";
  names.shared_expert_in_layer = true;
}

// Limits of activations by layer; null and 0: none.
void ReadLimits(const JsonObject& json, const char* key, float LayerSpec::*limit, ModelConfig& config) {
  if (!json.Has(key)) return;
  const Json& limits = json.Get(key);
  const auto is_limit = [](const Json& value) {
    return value.is_null() || (value.is_number() && value.get<double>() >= 0 && value.get<double>() <= 1e6);
  };
  if (!limits.is_array() || !std::ranges::all_of(limits, is_limit)) json.Fail(key, "a number or null for each layer");
  for (size_t layer = 0; layer < limits.size(); ++layer) {
    if (limits[layer].is_number()) config.layer_specs[layer].*limit = limits[layer].get<float>();
  }
}

void ReadStep(const JsonObject& original, ModelConfig& config) {
  config.num_nextn_predict_layers = static_cast<int>(original.Int("num_nextn_predict_layers", 0, 64, 0));
  const Json keys = WithoutPredictedLayers(original, config);
  const JsonObject json(keys, original.File());
  CheckStepKeys(json);
  ReadLayerTypes(json, static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0)), config);
  ReadStepHeads(json, config);
  ReadStepRopes(json, config);
  ReadStepExperts(json, config);
  ReadLimits(json, "swiglu_limits", &LayerSpec::expert_limit, config);
  ReadLimits(json, "swiglu_limits_shared", &LayerSpec::mlp_limit, config);
  config.norm_weight_offset = 1;
  config.qk_norm = QkNorm::kPerHead;
  config.attn_output_gate = OutputGate::kPerHead;
  config.names.output_gate = "g_proj";
  config.softmax_scale = 1 / std::sqrt(json.Number("query_pre_attn_scalar", 1, 1e6, config.head_dim));
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.mlp.bias = json.Bool("mlp_bias", false);
  // As published, and as transformers names the same in memory.
  config.names.decoders = {{}, {.prefix = "model.language_model."}};
}

constexpr std::string_view kStepDefaults = R"({"vocab_size": 128815, "hidden_size": 4096, "intermediate_size": 11264,
  "num_hidden_layers": 45, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
  "max_position_embeddings": 128000, "rms_norm_eps": 1e-5, "n_routed_experts": 288, "num_experts_per_tok": 8,
  "moe_intermediate_size": 1280, "share_expert_dim": 1280})";

}  // namespace

extern const Architecture kStep35 = {.name = "Step3p5ForCausalLM",
                                     .model_type = "step3p5",
                                     .read_config = ReadStep,
                                     .defaults = kStepDefaults,
                                     .reads_rope = true,
                                     .reads_activation = true,
                                     .rename_keys = RenameStepKeys};
extern const Architecture kStep37 = {.name = "Step3p7ForConditionalGeneration",
                                     .model_type = "step3p7",
                                     .read_config = ReadStep,
                                     .defaults = kStepDefaults,
                                     .reads_rope = true,
                                     .text_config = "text_config",
                                     .text_model_type = "step3p5",
                                     .reads_activation = true,
                                     .rename_keys = RenameStepKeys};

}  // namespace kvanta::models
