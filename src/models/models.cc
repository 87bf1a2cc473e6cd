#include <fmt/format.h>

#include <array>

#include "models/architecture.h"
#include "models/decoder.h"
#include "models/model.h"

namespace kvanta::models {

// NOLINTBEGIN(readability-redundant-declaration): tools/lint.py puts definitions and this list in one unit
extern const Architecture kLlama, kMistral, kMinistral, kMinistral3, kMistral3, kQwen2, kQwen3, kPhi3, kGlm, kGlm4,
    kGranite, kOlmo2, kOlmo3, kSmolLm3, kDeepseekV2, kDeepseekV3, kGemma2, kGemma3, kGemma3Multimodal, kGemma4,
    kGemma4Multimodal, kGemma4Unified, kGemma4UnifiedMultimodal, kQwen3Moe, kMixtral, kQwen2Moe, kGptOss, kGlm4Moe,
    kGlm4vMoe, kGlm4MoeLite, kMinimaxM2, kErnie45Moe, kOlmoe, kFlexOlmo, kGraniteMoe, kGraniteMoeShared, kDots1,
    kSolarOpen, kExaoneMoe, kQwen3VlMoe, kLlama4, kLlama4Multimodal, kQwen3Next, kQwen35, kQwen35Multimodal, kQwen35Moe,
    kQwen35MoeMultimodal, kGemma, kSeedOss, kErnie45, kExaone4, kHunYuanDense, kCwm, kYoutu, kHyperClovaX, kQwen2Vl,
    kQwen25Vl, kQwen3Vl, kCohere, kCohere2, kArcee, kNemotron, kStableLm, kLfm2, kLfm2Moe, kGraniteMoeHybrid, kBamba,
    kFalconH1, kNemotronH, kStarcoder2, kPhi, kGptNeox, kGpt2, kOpt, kApertus, kInternLm2, kMiniCpm, kChatGlm, kFalcon;
// NOLINTEND(readability-redundant-declaration)

std::span<const Architecture* const> Architectures() {
  static constexpr std::array kAll = {&kLlama,
                                      &kMistral,
                                      &kMinistral,
                                      &kMinistral3,
                                      &kMistral3,
                                      &kQwen2,
                                      &kQwen3,
                                      &kPhi3,
                                      &kGlm,
                                      &kGlm4,
                                      &kGranite,
                                      &kOlmo2,
                                      &kOlmo3,
                                      &kSmolLm3,
                                      &kDeepseekV2,
                                      &kDeepseekV3,
                                      &kGemma2,
                                      &kGemma3,
                                      &kGemma3Multimodal,
                                      &kGemma4,
                                      &kGemma4Multimodal,
                                      &kGemma4Unified,
                                      &kGemma4UnifiedMultimodal,
                                      &kQwen3Moe,
                                      &kMixtral,
                                      &kQwen2Moe,
                                      &kGptOss,
                                      &kGlm4Moe,
                                      &kGlm4vMoe,
                                      &kGlm4MoeLite,
                                      &kMinimaxM2,
                                      &kErnie45Moe,
                                      &kOlmoe,
                                      &kFlexOlmo,
                                      &kGraniteMoe,
                                      &kGraniteMoeShared,
                                      &kDots1,
                                      &kSolarOpen,
                                      &kExaoneMoe,
                                      &kQwen3VlMoe,
                                      &kLlama4,
                                      &kLlama4Multimodal,
                                      &kQwen3Next,
                                      &kQwen35,
                                      &kQwen35Multimodal,
                                      &kQwen35Moe,
                                      &kQwen35MoeMultimodal,
                                      &kGemma,
                                      &kSeedOss,
                                      &kErnie45,
                                      &kExaone4,
                                      &kHunYuanDense,
                                      &kCwm,
                                      &kYoutu,
                                      &kHyperClovaX,
                                      &kQwen2Vl,
                                      &kQwen25Vl,
                                      &kQwen3Vl,
                                      &kCohere,
                                      &kCohere2,
                                      &kArcee,
                                      &kNemotron,
                                      &kStableLm,
                                      &kLfm2,
                                      &kLfm2Moe,
                                      &kGraniteMoeHybrid,
                                      &kBamba,
                                      &kFalconH1,
                                      &kNemotronH,
                                      &kStarcoder2,
                                      &kPhi,
                                      &kGptNeox,
                                      &kGpt2,
                                      &kOpt,
                                      &kApertus,
                                      &kInternLm2,
                                      &kMiniCpm,
                                      &kChatGlm,
                                      &kFalcon};
  return kAll;
}

std::vector<std::string> KnownArchitectures() {
  std::vector<std::string> names;
  for (const Architecture* architecture : Architectures()) names.emplace_back(architecture->name);
  return names;
}

const Architecture* FindArchitecture(std::string_view name) {
  constexpr std::string_view kModel = "Model";
  const bool is_headless = name.ends_with(kModel);
  const std::string with_head =
      is_headless ? fmt::format("{}ForCausalLM", name.substr(0, name.size() - kModel.size())) : std::string(name);
  for (const Architecture* architecture : Architectures()) {
    const bool is_name = architecture->name == name || architecture->name == with_head;
    if (is_name || (!name.empty() && architecture->other_name == name)) return architecture;
  }
  return nullptr;
}

std::unique_ptr<Model> Load(const std::string& folder, kernels::Ops& ops, const LoadOptions& options) {
  const ModelConfig config = ReadConfig(folder);
  const weights::Checkpoint checkpoint = weights::Checkpoint::Open(folder);
  return LoadDecoder(config, checkpoint, ops, options);
}

}  // namespace kvanta::models
