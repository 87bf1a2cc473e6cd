// Phi-3, Phi-3.5 and Phi-4: Llama with q, k and v in one matrix, gate and up in another, longrope, and heads that may
// be rotated in part. transformers: models/phi3/modeling_phi3.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadPhi3(const JsonObject& json, ModelConfig& config) {
  config.qkv_layout = QkvLayout::kConcatenated;
  config.mlp.kind = MlpKind::kFusedGate;
  const RopeType rope = config.layer_specs.front().rope.type;
  if (rope != RopeType::kDefault && rope != RopeType::kLongRope) {
    json.Fail(json.Has("rope_parameters") ? "rope_parameters" : "rope_scaling", "a rope_type default or longrope");
  }
  const auto window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0));
  for (LayerSpec& layer : config.layer_specs) layer.visibility = cache::SlidingWindow(window);
}

constexpr std::string_view kPhi3Defaults = R"({"rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
  "original_max_position_embeddings": 4096, "eos_token_id": 32000, "bos_token_id": 1})";

}  // namespace

extern const Architecture kPhi3 = {.name = "Phi3ForCausalLM",
                                   .model_type = "phi3",
                                   .read_config = ReadPhi3,
                                   .defaults = kPhi3Defaults,
                                   .partial_rotary = true};

}  // namespace kvanta::models
