#include <fmt/format.h>

#include <array>

#include "models/architecture.h"
#include "models/decoder.h"
#include "models/model.h"

namespace kvanta::models {

// NOLINTBEGIN(readability-redundant-declaration): tools/lint.py puts definitions and this list in one unit
extern const Architecture kLlama, kMistral, kMinistral, kMinistral3, kMistral3, kQwen2, kQwen3, kPhi3, kGlm, kGlm4,
    kGranite, kOlmo2, kOlmo3, kSmolLm3, kDeepseekV2, kDeepseekV3, kDeepseekV32, kDeepseekV4, kGlmMoeDsa, kGemma2,
    kGemma3, kGemma3Multimodal, kGemma4, kGemma4Multimodal, kGemma4Unified, kGemma4UnifiedMultimodal, kQwen3Moe,
    kMixtral, kQwen2Moe, kGptOss, kGlm4Moe, kGlm4vMoe, kGlm4MoeLite, kMinimaxM2, kErnie45Moe, kOlmoe, kFlexOlmo,
    kGraniteMoe, kGraniteMoeShared, kDots1, kSolarOpen, kExaoneMoe, kQwen3VlMoe, kLlama4, kLlama4Multimodal, kQwen3Next,
    kQwen35, kQwen35Multimodal, kQwen35Moe, kQwen35MoeMultimodal, kGemma, kSeedOss, kErnie45, kExaone4, kHunYuanDense,
    kCwm, kYoutu, kHyperClovaX, kQwen2Vl, kQwen25Vl, kQwen3Vl, kCohere, kCohere2, kArcee, kNemotron, kStableLm, kLfm2,
    kLfm2Moe, kGraniteMoeHybrid, kBamba, kFalconH1, kNemotronH, kKimiLinear, kAfmoe, kAyaVision, kCohere2Vision,
    kExaone45, kGlm46v, kGlm4v, kHunYuanMoe, kIdefics3, kInternVl, kKimiK25, kLfm2Vl, kLlava, kLlavaNext,
    kLlavaOnevision, kMimoV2Flash, kMistral4, kPhimoe, kQwen25Omni, kQwen3Omni, kSmolVlm, kStarcoder2, kPhi, kGptNeox,
    kGpt2, kOpt, kApertus, kInternLm2, kMiniCpm, kChatGlm, kFalcon, kStep35, kStep37, kLaguna, kMellum, kHyV3,
    kCohere2Moe, kGraniteSwa, kGraniteMoeSwa, kJais2, kHelium, kNanoChat, kGptJ, kGptBigCode, kOlmo, kVaultGemma, kAxK1,
    kBailingHybrid, kMistralLarge4;
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
                                      &kDeepseekV32,
                                      &kDeepseekV4,
                                      &kGlmMoeDsa,
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
                                      &kKimiLinear,
                                      &kAfmoe,
                                      &kAyaVision,
                                      &kCohere2Vision,
                                      &kExaone45,
                                      &kGlm46v,
                                      &kGlm4v,
                                      &kHunYuanMoe,
                                      &kIdefics3,
                                      &kInternVl,
                                      &kKimiK25,
                                      &kLfm2Vl,
                                      &kLlava,
                                      &kLlavaNext,
                                      &kLlavaOnevision,
                                      &kMimoV2Flash,
                                      &kMistral4,
                                      &kPhimoe,
                                      &kQwen25Omni,
                                      &kQwen3Omni,
                                      &kSmolVlm,
                                      &kStarcoder2,
                                      &kPhi,
                                      &kGptNeox,
                                      &kGpt2,
                                      &kOpt,
                                      &kApertus,
                                      &kInternLm2,
                                      &kMiniCpm,
                                      &kChatGlm,
                                      &kFalcon,
                                      &kStep35,
                                      &kStep37,
                                      &kLaguna,
                                      &kMellum,
                                      &kHyV3,
                                      &kCohere2Moe,
                                      &kGraniteSwa,
                                      &kGraniteMoeSwa,
                                      &kJais2,
                                      &kHelium,
                                      &kNanoChat,
                                      &kGptJ,
                                      &kGptBigCode,
                                      &kOlmo,
                                      &kVaultGemma,
                                      &kAxK1,
                                      &kBailingHybrid,
                                      &kMistralLarge4};
  return kAll;
}

std::vector<std::string> KnownArchitectures() {
  std::vector<std::string> names;
  for (const Architecture* architecture : Architectures()) names.emplace_back(architecture->name);
  return names;
}

namespace {

// True for one of the words of a list with spaces between.
bool HasWord(std::string_view list, std::string_view word) {
  return !word.empty() && word.find(' ') == word.npos &&
         fmt::format(" {} ", list).find(fmt::format(" {} ", word)) != std::string::npos;
}

}  // namespace

const Architecture* FindArchitecture(std::string_view name) {
  constexpr std::string_view kModel = "Model";
  const bool is_headless = name.ends_with(kModel);
  const std::string with_head =
      is_headless ? fmt::format("{}ForCausalLM", name.substr(0, name.size() - kModel.size())) : std::string(name);
  for (const Architecture* architecture : Architectures()) {
    const bool is_name = architecture->name == name || architecture->name == with_head;
    if (is_name || HasWord(architecture->other_name, name)) return architecture;
  }
  return nullptr;
}

std::unique_ptr<Model> Load(const std::string& folder, kernels::Ops& ops, const LoadOptions& options) {
  const ModelConfig config = ReadConfig(folder);
  const weights::Checkpoint checkpoint = weights::Checkpoint::Open(folder);
  return LoadDecoder(config, checkpoint, ops, options);
}

std::unique_ptr<Model> LoadPredictor(const std::string& folder, Model& target, const LoadOptions& options) {
  LoadOptions own = options;
  own.predicts_for = &target;
  const weights::Checkpoint checkpoint = weights::Checkpoint::Open(folder);
  return LoadDecoder(ConfigOfPredictor(ReadConfig(folder)), checkpoint, target.ops(), own);
}

}  // namespace kvanta::models
