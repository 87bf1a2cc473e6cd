// Classes of text and images whose language model is another class, the one that text_config names by its model_type.
// The language model alone, for prompts of text. transformers: models/llava/modeling_llava.py and, by the names of the
// classes, those of the others; conversion_mapping.py has the names of tensors in older files. What a language model's
// own class does to its logits (Cohere's logit_scale, Gemma 2's softcap) is done here, too; the classes leave
// it out.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

// As older files have it, and as transformers saves it since version 5.
void FindLanguageModel(const JsonObject& /*json*/, ModelConfig& config) {
  const std::string_view embedding = config.names.decoders.front().embedding;
  config.names.decoders = {{"language_model.model.", "language_model.lm_head", embedding},
                           {"model.language_model.", "lm_head", embedding}};
}

void FindTextModel(const JsonObject& /*json*/, ModelConfig& config) {
  config.names.decoders = {{"model.text_model.", "lm_head", config.names.decoders.front().embedding}};
}

constexpr std::string_view kTied = R"({"tie_word_embeddings": true})";

consteval Architecture TextAndImages(std::string_view name, std::string_view model_type,
                                     std::string_view text_model_type, std::string_view defaults = "{}",
                                     std::string_view other_name = "") {
  return {.name = name,
          .model_type = model_type,
          .read_config = FindLanguageModel,
          .defaults = defaults,
          .other_name = other_name,
          .text_config = "text_config",
          .text_model_type = text_model_type,
          .has_text_class = true};
}

// Kimi-VL has the same layout as Kimi K2.5, whose class it is read as.
consteval Architecture KimiK25() {
  Architecture kimi = TextAndImages("Kimi_K25ForConditionalGeneration", "kimi_k25", "deepseek_v3", kTied,
                                    "KimiK25ForConditionalGeneration KimiVLForConditionalGeneration");
  kimi.other_model_type = "kimi_vl";
  return kimi;
}

// Idefics 3 and what came of it.
consteval Architecture Idefics(std::string_view name, std::string_view model_type) {
  Architecture idefics = TextAndImages(name, model_type, "llama", R"({"rms_norm_eps": 1e-5})");
  idefics.read_config = FindTextModel;
  return idefics;
}

}  // namespace

extern const Architecture kAyaVision =
    TextAndImages("AyaVisionForConditionalGeneration", "aya_vision", "cohere2", kTied);
extern const Architecture kCohere2Vision =
    TextAndImages("Cohere2VisionForConditionalGeneration", "cohere2_vision", "cohere2", kTied);
extern const Architecture kExaone45 = TextAndImages("Exaone4_5_ForConditionalGeneration", "exaone4_5", "exaone4");
extern const Architecture kIdefics3 = Idefics("Idefics3ForConditionalGeneration", "idefics3");
extern const Architecture kInternVl = TextAndImages("InternVLForConditionalGeneration", "internvl", "qwen2", kTied);
extern const Architecture kKimiK25 = KimiK25();
extern const Architecture kLfm2Vl = TextAndImages("Lfm2VlForConditionalGeneration", "lfm2_vl", "lfm2", kTied);
extern const Architecture kLlava = TextAndImages("LlavaForConditionalGeneration", "llava", "llama");
extern const Architecture kLlavaNext = TextAndImages("LlavaNextForConditionalGeneration", "llava_next", "llama");
extern const Architecture kLlavaOnevision =
    TextAndImages("LlavaOnevisionForConditionalGeneration", "llava_onevision", "qwen2");
extern const Architecture kMistral3 = TextAndImages("Mistral3ForConditionalGeneration", "mistral3", "mistral", kTied);
extern const Architecture kSmolVlm = Idefics("SmolVLMForConditionalGeneration", "smolvlm");

}  // namespace kvanta::models
