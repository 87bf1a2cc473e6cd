// Solar Open: Llama's attention with GLM-4.5's experts in all layers. transformers:
// models/solar_open/modeling_solar_open.py.
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

void ReadSolarOpen(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kFirst = "first_k_dense_replace";
  config.qkv_bias = json.Bool("attention_bias", false);
  // Keys of GLM-4.5 in published files that the class does not have.
  if (json.Bool("use_qk_norm", false)) json.Fail("use_qk_norm", "false");
  if (json.Int(kFirst, 0, int64_t{1} << 20, 0) != 0) json.Fail(kFirst, "0: all layers have experts");
  MarkSparseLayers(0, config);
  ReadSigmoidExperts(json, "n_routed_experts", "n_shared_experts", config);
}

// intermediate_size: no layer has an MLP of its own.
constexpr std::string_view kSolarOpenDefaults = R"({"num_key_value_heads": 8, "head_dim": 128,
  "intermediate_size": 1280, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
  "moe_intermediate_size": 1280, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072})";

}  // namespace

extern const Architecture kSolarOpen = {.name = "SolarOpenForCausalLM",
                                        .model_type = "solar_open",
                                        .read_config = ReadSolarOpen,
                                        .defaults = kSolarOpenDefaults,
                                        .rope_theta = 1e6};

}  // namespace kvanta::models
