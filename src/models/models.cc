#include <array>

#include "models/architecture.h"
#include "models/model.h"

namespace kvanta::models {

std::span<const Architecture* const> Architectures() {
  static constexpr std::array<const Architecture*, 6> kAll = {&kLlama, &kMistral,    &kQwen2,
                                                              &kQwen3, &kDeepseekV2, &kDeepseekV3};
  return kAll;
}

std::vector<std::string> KnownArchitectures() {
  std::vector<std::string> names;
  for (const Architecture* architecture : Architectures()) names.emplace_back(architecture->name);
  return names;
}

std::unique_ptr<Model> Load(const std::string& folder, kernels::Ops& ops, const LoadOptions& options) {
  const ModelConfig config = ReadConfig(folder);
  const Checkpoint checkpoint = Checkpoint::Open(folder);
  for (const Architecture* architecture : Architectures()) {
    if (architecture->name == config.architecture) return architecture->load(config, checkpoint, ops, options);
  }
  return nullptr;  // not reached: ReadConfig() refuses unknown architectures
}

}  // namespace kvanta::models
