#include "weights/safetensors.h"

#include "fuzz/fuzz_input.h"
#include "models/config/config.h"
#include "models/kv_scales.h"

using namespace kvanta;  // NOLINT(google-build-using-namespace)

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const uint8_t> file(data, size);
  fuzz::MustReadOrRefuse([&] {
    const weights::TensorMap tensors = weights::ParseSafetensors(file, "fuzz");
    uint32_t sum = 0;
    for (const auto& [name, tensor] : tensors) {
      for (const uint8_t byte : tensor.data) sum += byte;  // every view must lie inside the file
    }
    volatile uint32_t read = sum;
    static_cast<void>(read);
    models::ModelConfig config;
    config.layers = 2;
    config.kv_heads = 2;
    models::FillLayerSpecs(config);
    models::ReadScaleTensors(weights::Checkpoint::OfTensors(tensors, "fuzz"), config);
  });
  fuzz::MustReadOrRefuse([&] { weights::ParseShardIndex(fuzz::Text(file), "fuzz"); });
  return 0;
}
