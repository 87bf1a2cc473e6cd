#include "models/kv_scales.h"

#include <cmath>

#include "fuzz/fuzz_input.h"

using namespace kvanta;  // NOLINT(google-build-using-namespace)

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  models::ModelConfig config;
  config.architecture = "LlamaForCausalLM";
  config.model_type = "llama";
  config.layers = 2;
  config.kv_heads = 2;
  config.head_dim = 8;
  models::FillLayerSpecs(config);
  fuzz::MustReadOrRefuse([&] {
    const models::KvScales scales = models::ParseScaleFile(fuzz::Text({data, size}), "fuzz", config);
    // Accepted input must be usable as it is.
    if (scales.layers.size() != 2) __builtin_trap();
    for (const formats::LayerScales& layer : scales.layers) {
      if (layer.k.eigen != nullptr && MakeKltTransform(*layer.k.eigen, 2, 8, 3)->allocations().size() != 2) {
        __builtin_trap();
      }
      for (const formats::SideScales* side : {&layer.k, &layer.v}) {
        if (side->scale.size() != 2 || (!side->mean.empty() && side->mean.size() != 16)) __builtin_trap();
        for (const float scale : side->scale) {
          if (!std::isfinite(scale) || !(scale > 0)) __builtin_trap();
        }
      }
    }
  });
  return 0;
}
