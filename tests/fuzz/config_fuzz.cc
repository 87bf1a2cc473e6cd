#include "models/config/config.h"

#include <cmath>

#include "fuzz/fuzz_input.h"
#include "kernels/attention/cpu/table.h"
#include "models/blocks/rope.h"

using namespace kvanta;  // NOLINT(google-build-using-namespace)

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = fuzz::Text({data, size});
  fuzz::MustReadOrRefuse([&] {
    const models::ModelConfig config = models::ParseConfig(text, "fuzz");
    if (config.head_dim < 8 || config.head_dim > kernels::kMaxHeadDim || config.heads % config.kv_heads != 0)
      __builtin_trap();
    if (config.layer_specs.size() != static_cast<size_t>(config.layers)) __builtin_trap();
    // Every rope that a config can ask for has a finite table.
    for (const models::LayerSpec& layer : config.layer_specs) {
      for (const int64_t positions : {int64_t{1}, config.max_position}) {
        const models::RopeFrequencies rope = models::MakeRopeFrequencies(layer.rope, positions);
        if (!std::isfinite(rope.attention_scaling)) __builtin_trap();
        for (const float frequency : rope.inverse) {
          if (!std::isfinite(frequency * static_cast<float>(config.max_position))) __builtin_trap();
        }
      }
    }
  });
  models::ModelConfig config;
  config.vocab = 100;
  fuzz::MustReadOrRefuse([&] { models::AddGenerationConfig(text, "fuzz", config); });
  fuzz::MustReadOrRefuse([&] { models::AddHfQuantConfig(text, "fuzz", config); });
  return 0;
}
