// Granite with windows: full attention in every fourth layer, from the first on, sinks in all layers, a base of the
// rope by layer. With experts: those of Granite 3. transformers: models/granite_swa/modeling_granite_swa.py,
// models/granitemoe_swa/modeling_granitemoe_swa.py.
#include <fmt/format.h>

#include <algorithm>

#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadGraniteWindows(const JsonObject& json, ModelConfig& config) {
  constexpr int kPattern = 4;
  const auto window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27));
  if (!ReadLayerTypes(json, window, config)) {
    for (int layer = 0; layer < config.layers; ++layer) {
      if (layer % kPattern != 0)
        config.layer_specs[static_cast<size_t>(layer)].visibility = cache::SlidingWindow(window);
    }
  }
  for (LayerSpec& layer : config.layer_specs) layer.attention_sinks = true;
  constexpr const char* kThetas = "layer_rope_theta";
  if (!json.Has(kThetas)) return;
  const Json& thetas = json.Get(kThetas);
  const auto is_theta = [](const Json& theta) {
    return theta.is_number() && (theta == 0 || (theta.get<double>() > 1 && theta.get<double>() <= 1e15));
  };
  if (!thetas.is_array() || thetas.size() != config.layer_specs.size() || !std::ranges::all_of(thetas, is_theta)) {
    json.Fail(kThetas, fmt::format("a number above 1, or 0 for no rope, for each of {} layers", config.layers));
  }
  for (size_t layer = 0; layer < thetas.size(); ++layer) {
    RopeSpec& rope = config.layer_specs[layer].rope;
    rope.theta = thetas[layer].get<double>();
    if (rope.theta == 0) rope = {};
  }
}

void ReadGraniteSwa(const JsonObject& json, ModelConfig& config) {
  ReadGranite(json, config);
  ReadGraniteWindows(json, config);
}

void ReadGraniteMoeSwa(const JsonObject& json, ModelConfig& config) {
  ReadGraniteMoeShared(json, config);
  ReadGraniteWindows(json, config);
  config.names.router = "router";
  config.names.fused_gate_up = "experts.gate_up_proj";
  config.names.fused_down = "experts.down_proj";
}

constexpr std::string_view kGraniteSwaDefaults = R"({"vocab_size": 100352, "hidden_size": 2560,
  "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 20, "num_key_value_heads": 4,
  "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "sliding_window": 128,
  "eos_token_id": 100257, "bos_token_id": 100257})";
constexpr std::string_view kGraniteMoeSwaDefaults = R"({"vocab_size": 32000, "hidden_size": 4096,
  "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_local_experts": 8,
  "num_experts_per_tok": 2, "max_position_embeddings": 2048, "sliding_window": 128, "eos_token_id": 2,
  "bos_token_id": 1})";

}  // namespace

extern const Architecture kGraniteSwa = {"GraniteSWAForCausalLM", "granite_swa", ReadGraniteSwa, kGraniteSwaDefaults};
extern const Architecture kGraniteMoeSwa = {"GraniteMoeSWAForCausalLM", "granitemoe_swa", ReadGraniteMoeSwa,
                                            kGraniteMoeSwaDefaults};

}  // namespace kvanta::models
