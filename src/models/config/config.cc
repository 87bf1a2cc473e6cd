#include "models/config/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>

#include "base/json.h"
#include "base/quote.h"
#include "kernels/attention/cpu/table.h"
#include "kvanta/error.h"
#include "models/architecture.h"
#include "models/config/declarations.h"
#include "models/config/rope_config.h"
#include "models/config/token_ids.h"
#include "models/model.h"
#include "weights/quantization_config.h"
#include "weights/safetensors.h"

namespace kvanta::models {
namespace {

constexpr const char* kConfigFile = "config.json";
constexpr const char* kHfQuantConfigFile = "hf_quant_config.json";
constexpr const char* kModelSlimFile = "quant_model_description.json";
// Far above every model; products of two do not overflow.
constexpr int64_t kMaxWidth = int64_t{1} << 24, kMaxLayers = 4096;

const Architecture& ReadArchitecture(const JsonObject& json) {
  constexpr const char* kKey = "architectures";
  const std::vector<std::string> known = KnownArchitectures();
  const Json* names = json.Find(kKey);
  if (names == nullptr || names->empty()) {  // transformers' AutoModel goes by the model_type
    const std::string type = json.String("model_type", "");
    const auto all = Architectures();
    const auto found = std::ranges::find_if(all, [&](const Architecture* each) { return each->model_type == type; });
    if (found != all.end()) return **found;
  }
  if (names == nullptr || !names->is_array() || names->empty() || !(*names)[0].is_string()) {
    json.Fail(kKey, fmt::format("a list with a class, such as {}; docs/support.md has all", Quote(known.front())));
  }
  for (const Json& name : *names) {  // some lists begin with a class of the publisher's own
    if (!name.is_string()) continue;
    if (const Architecture* architecture = FindArchitecture(name.get_ref<const std::string&>())) return *architecture;
  }
  const std::string& first = (*names)[0].get_ref<const std::string&>();
  throw InputError(
      fmt::format("{}: unknown architecture {}; the nearest of the {} known ones: {}; docs/support.md has all",
                  json.File(), Quote(first), known.size(), fmt::join(Nearest(first, known), ", ")));
}

void ReadHeads(const JsonObject& json, ModelConfig& config) {
  config.heads = static_cast<int>(json.Int("num_attention_heads", 1, 65536));
  config.kv_heads = static_cast<int>(json.Int("num_key_value_heads", 1, config.heads, config.heads));
  if (config.heads % config.kv_heads != 0) {
    json.Fail("num_key_value_heads", fmt::format("a divisor of num_attention_heads ({})", config.heads));
  }
  constexpr int kUnit = 8;
  // The largest that a backend takes: the CPU's. A GPU's refuses more than its own.
  using kernels::kMaxHeadDim;
  if (json.Has("head_dim")) {
    config.head_dim = static_cast<int>(json.Int("head_dim", kUnit, kMaxHeadDim));
  } else {
    if (config.hidden % config.heads != 0) {
      json.Fail("num_attention_heads", fmt::format("a divisor of hidden_size ({}), or head_dim", config.hidden));
    }
    config.head_dim = config.hidden / config.heads;
  }
  if (config.head_dim % kUnit != 0 || config.head_dim > kMaxHeadDim) {
    throw InputError(fmt::format("{}: heads of {} channels; supported are multiples of {} up to {}", json.File(),
                                 config.head_dim, kUnit, kMaxHeadDim));
  }
  config.softmax_scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim));
}

// Names of transformers' ACT2FN.
kernels::Pointwise ReadPointwise(const JsonObject& json, std::string_view key) {
  using kernels::Pointwise;
  const std::string name = json.String(key);
  if (name == "relu") return Pointwise::kRelu;
  if (name == "relu2") return Pointwise::kSquaredRelu;
  if (name == "gelu") return Pointwise::kGelu;
  if (name == "xielu") return Pointwise::kXielu;
  if (name != "gelu_new" && name != "gelu_fast" && name != "gelu_pytorch_tanh") {
    json.Fail(key, "gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, relu, relu2 or xielu");
  }
  return Pointwise::kGeluTanh;
}

kernels::Activation ReadActivation(const JsonObject& json, const Architecture& architecture) {
  constexpr const char* kKnown = "silu or gelu_pytorch_tanh";
  const std::string_view key = architecture.activation_key;
  if (json.Value().contains(key) && !json.Has(key)) json.Fail(key, kKnown);  // null: of no class a default
  const std::string name = json.String(key, "silu");
  if (name == "silu" || name == "swish") return kernels::Activation::kSilu;
  if (name == "gelu" && architecture.gelu_is_tanh) return kernels::Activation::kGeluTanh;
  if (name != "gelu_pytorch_tanh") json.Fail(key, kKnown);
  return kernels::Activation::kGeluTanh;
}

// The class of the language model alone, whose defaults a text_config may leave out.
const Architecture& TextArchitecture(const JsonObject& text, const Architecture& architecture) {
  constexpr const char* kType = "model_type";
  const std::string type = text.String(kType, architecture.text_model_type);
  std::vector<std::string_view> known;
  for (const Architecture* each : Architectures()) {
    if (architecture.has_text_class && !each->text_config.empty()) continue;
    if (each->model_type == type || (!type.empty() && each->other_model_type == type)) return *each;
    known.push_back(each->model_type);
  }
  if (architecture.has_text_class) text.Fail(kType, fmt::format("one of {}", fmt::join(known, ", ")));
  return architecture;
}

// The class's rope, unless the file has one in either generation's key.
void AddDefaultRope(const Architecture& architecture, Json& keys) {
  constexpr const char* kParameters = "rope_parameters";
  constexpr const char* kScaling = "rope_scaling";
  if (architecture.default_rope.empty()) return;
  const bool has_parameters = keys.contains(kParameters) && !keys[kParameters].is_null();
  const bool has_scaling = keys.contains(kScaling) && !keys[kScaling].is_null() && !keys[kScaling].empty();
  if (!has_parameters && !has_scaling) keys[kParameters] = Json::parse(architecture.default_rope);
}

bool HasTextConfig(const Json& root, const Architecture& architecture) {
  if (architecture.text_config.empty()) return false;
  return !architecture.text_config_optional || root.contains(architecture.text_config);
}

// The class that reads the language model's keys.
const Architecture& LanguageModel(const Json& root, const Architecture& architecture, const std::string& name) {
  if (!HasTextConfig(root, architecture)) return architecture;
  return TextArchitecture(JsonObject(root, name).Object(architecture.text_config), architecture);
}

// The language model's keys: the class's defaults, those of `text_config` or of the whole file, and those that a file
// with a text_config has at its top all the same.
Json LanguageModelKeys(const Json& root, const Architecture& architecture, const std::string& name) {
  Json keys = Json::parse(architecture.defaults);
  if (!HasTextConfig(root, architecture)) {
    Json file = root;
    if (architecture.rename_keys != nullptr) architecture.rename_keys(file);
    keys.update(file);
    AddDefaultRope(architecture, keys);
    return keys;
  }
  const JsonObject text = JsonObject(root, name).Object(architecture.text_config);
  const Architecture& language_model = TextArchitecture(text, architecture);
  keys = Json::parse(language_model.defaults);
  keys.update(Json::parse(language_model.text_defaults));
  keys.update(Json::parse(architecture.defaults));
  Json file = text.Value();
  if (language_model.rename_keys != nullptr) language_model.rename_keys(file);
  keys.update(file);
  AddDefaultRope(language_model, keys);
  for (const char* key : {"dtype", "torch_dtype", "eos_token_id", "bos_token_id", "tie_word_embeddings",
                          "quantization_config", "compression_config"}) {
    if (root.contains(key)) keys[key] = root[key];
  }
  return keys;
}

// Puts the keys of the object `outer` to the top of the file.
void MoveUp(std::string_view outer, Json& root, const std::string& name) {
  if (outer.empty() || !root.contains(outer)) return;
  Json keys = JsonObject(root, name).Object(outer).Value();
  for (const char* key : {"model_type", "architectures"}) keys.erase(key);
  root.update(keys);
}

// The type of the weights; nullopt where the file does not say it. transformers 4 wrote "torch.bfloat16" at first.
std::optional<DType> ReadDTypeKey(const JsonObject& json) {
  const std::string_view key = json.Has("dtype") ? "dtype" : "torch_dtype";
  std::string dtype = json.String(key, "auto");
  constexpr std::string_view kModule = "torch.";
  if (dtype.starts_with(kModule)) dtype.erase(0, kModule.size());
  if (dtype == "auto") return std::nullopt;
  if (dtype == "half") return DType::kF16;
  if (dtype == "float" || dtype == "double" || dtype == "float64") return DType::kF32;
  if (dtype != Name(DType::kBf16) && dtype != Name(DType::kF16) && dtype != Name(DType::kF32)) {
    json.Fail(key, "bfloat16, float16 or float32");
  }
  return ParseDType(dtype);
}

std::string EmbeddingName(const TensorNames::Decoder& names) {
  return fmt::format("{}{}.weight", names.prefix, names.embedding);
}

// Type of the weights in the folder, if there are any.
void ReadDType(const std::string& folder, ModelConfig& config) {
  config.dtype_known = weights::Checkpoint::Exists(folder);
  if (!config.dtype_known) return;
  const weights::Checkpoint checkpoint = weights::Checkpoint::Open(folder);
  const std::string module = EmbeddingModule(config, DecoderNames(config, checkpoint), checkpoint);
  const std::string& dtype = checkpoint.Get(module + ".weight").dtype;
  config.dtype = dtype == "BF16" ? DType::kBf16 : dtype == "F16" ? DType::kF16 : DType::kF32;
}

bool HasPrefix(const weights::Checkpoint& checkpoint, std::string_view prefix) {
  const auto found = checkpoint.Tensors().lower_bound(prefix);
  return found != checkpoint.Tensors().end() && found->first.starts_with(prefix);
}

bool IsSameTensor(const weights::TensorView& a, const weights::TensorView& b) {
  return a.dtype == b.dtype && a.shape == b.shape && std::ranges::equal(a.data, b.data);
}

// transformers: an output matrix that differs from the embeddings is used, even if config.json ties them. Checkpoints
// of embedding models have none.
void ReadHead(const std::string& folder, ModelConfig& config) {
  if (!weights::Checkpoint::Exists(folder)) return;
  const weights::Checkpoint checkpoint = weights::Checkpoint::Open(folder);
  const TensorNames::Decoder& names = DecoderNames(config, checkpoint);
  if (!config.tied_embeddings) {
    config.has_lm_head = HasPrefix(checkpoint, std::string(names.lm_head) + ".");
    return;
  }
  const weights::TensorView* head = checkpoint.Find(std::string(names.lm_head) + ".weight");
  const weights::TensorView* embeddings = checkpoint.Find(EmbeddingName(names));
  config.tied_embeddings = head == nullptr || embeddings == nullptr || IsSameTensor(*head, *embeddings);
}

ModelConfig ReadFolder(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) {
    throw InputError(
        fmt::format("model {}: no such folder; expected one with config.json and *.safetensors", Quote(folder, 400)));
  }
  const auto path = [&](const char* file) { return (fs::path(folder) / file).string(); };
  bool dtype_missing = false;
  ModelConfig config = ParseConfig(ReadTextFile(path(kConfigFile)), path(kConfigFile), &dtype_missing);
  if (const std::string file = path("generation_config.json"); fs::exists(file, ignored)) {
    AddGenerationConfig(ReadTextFile(file), file, config);
  }
  if (const std::string file = path(kHfQuantConfigFile); fs::exists(file, ignored)) {
    AddHfQuantConfig(ReadTextFile(file), file, config);
  }
  if (const std::string file = path(kModelSlimFile); fs::exists(file, ignored)) {
    AddModelSlimConfig(ReadTextFile(file), file, config);
  }
  if (dtype_missing) ReadDType(folder, config);
  ReadHead(folder, config);
  return config;
}

}  // namespace

void RenameKey(Json& keys, const char* from, const char* to) {
  if (keys.contains(from) && !keys.contains(to)) keys[to] = keys[from];
}

void RemoveHeadKeys(Json& keys) {
  for (const char* key : {"num_key_value_heads", "head_dim"}) keys.erase(key);
}

void SetFourfoldMlp(Json& keys) {
  Json& size = keys["intermediate_size"];
  if (!size.is_null()) return;
  const auto found = keys.find("hidden_size");
  const int64_t hidden = found != keys.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
  if (hidden > 0 && hidden <= kMaxWidth) {
    size = 4 * hidden;
  } else {
    keys.erase("intermediate_size");
  }
}

const TensorNames::Decoder& DecoderNames(const ModelConfig& config, const weights::Checkpoint& checkpoint) {
  for (const TensorNames::Decoder& decoder : config.names.decoders) {
    if (checkpoint.Find(EmbeddingName(decoder)) != nullptr) return decoder;
  }
  for (const TensorNames::Decoder& decoder : config.names.decoders) {
    if (HasPrefix(checkpoint, fmt::format("{}{}.", decoder.prefix, decoder.layers))) return decoder;
  }
  return config.names.decoders.front();
}

std::string EmbeddingModule(const ModelConfig& config, const TensorNames::Decoder& names,
                            const weights::Checkpoint& checkpoint) {
  std::string module = fmt::format("{}{}", names.prefix, names.embedding);
  const bool has_head_alone = config.tied_embeddings && !HasPrefix(checkpoint, module + ".") &&
                              checkpoint.Find(std::string(names.lm_head) + ".weight") != nullptr;
  return has_head_alone ? std::string(names.lm_head) : module;
}

ModelConfig ParseConfig(std::string_view text, const std::string& name, bool* dtype_missing) {
  Json root = ParseConfigJson(text, name);
  const JsonObject top(root, name);
  const Architecture& architecture = ReadArchitecture(top);
  MoveUp(architecture.outer_config, root, name);
  ModelConfig config;
  config.architecture = architecture.name;
  config.model_type = top.String("model_type", architecture.model_type);
  const bool is_other = !architecture.other_model_type.empty() && config.model_type == architecture.other_model_type;
  if (config.model_type != architecture.model_type && !is_other) {
    const std::string other =
        architecture.other_model_type.empty() ? "" : fmt::format(" or '{}'", architecture.other_model_type);
    top.Fail("model_type", fmt::format("'{}'{}, the architecture's", architecture.model_type, other));
  }
  const Json keys = LanguageModelKeys(root, architecture, name);
  const JsonObject json(keys, name, HasTextConfig(root, architecture) ? std::string(architecture.text_config) : "");
  if (!json.Bool("is_causal", true)) {
    json.Fail("is_causal", "true: attention in both directions is not supported");
  }
  const std::optional<DType> dtype = ReadDTypeKey(json);
  if (dtype_missing != nullptr) *dtype_missing = !dtype;
  config.dtype = dtype.value_or(config.dtype);
  config.hidden = static_cast<int>(json.Int("hidden_size", 1, kMaxWidth));
  config.layers = static_cast<int>(json.Int("num_hidden_layers", 1, kMaxLayers));
  config.intermediate_size = static_cast<int>(json.Int("intermediate_size", 1, kMaxWidth));
  config.vocab = static_cast<int>(json.Int("vocab_size", 1, kMaxWidth));
  ReadHeads(json, config);
  config.rms_eps = json.Number("rms_norm_eps", 0, 1, config.rms_eps);
  config.tied_embeddings = json.Bool("tie_word_embeddings", false);
  const Architecture& reader = architecture.has_text_class ? LanguageModel(root, architecture, name) : architecture;
  if (reader.ungated_mlp) {
    config.mlp.kind = MlpKind::kUngated;
    config.mlp.pointwise = ReadPointwise(json, reader.activation_key);
  } else if (!reader.reads_activation) {
    config.mlp.activation = config.moe.activation = ReadActivation(json, reader);
  }
  config.layer_specs.resize(static_cast<size_t>(config.layers));
  if (!reader.reads_rope) {
    const int64_t max_position = ReadMaxPosition(json);
    const RopeSpec rope = ReadRopeSpec(json, config.head_dim, max_position, reader.rope_theta, reader.partial_rotary);
    SetRope(rope, max_position, config);
  }
  reader.read_config(json, config);
  if (&reader != &architecture) architecture.read_config(json, config);
  FillLayerSpecs(config);
  AddEosIds(json, config);
  config.bos_token_id = ReadBosId(json, config.vocab);
  // Embedding models are saved without what contains the decoder.
  auto& decoders = config.names.decoders;
  if (decoders.size() == 1 && decoders.front().prefix == "model.") decoders.push_back({.prefix = ""});
  for (const char* key : {"quantization_config", "compression_config"}) {  // the second: early compressed-tensors
    if (json.Has(key) && !json.Get(key).empty())
      Declare(weights::ReadQuantizationConfig(json.Object(key)), name, config);
  }
  return config;
}

std::string ReadConfigText(const std::string& folder) {
  namespace fs = std::filesystem;
  std::string text = ReadTextFile((fs::path(folder) / kConfigFile).string());
  const std::string file = (fs::path(folder) / kHfQuantConfigFile).string();
  std::error_code ignored;
  if (fs::exists(file, ignored)) text += ReadTextFile(file);
  return text;
}

ModelConfig ReadConfig(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return ReadFolder(path);
  if (fs::path(path).filename() == kConfigFile) return ReadFolder(fs::absolute(path, ignored).parent_path().string());
  bool dtype_missing = false;
  ModelConfig config = ParseConfig(ReadTextFile(path), path, &dtype_missing);
  config.dtype_known = !dtype_missing;
  return config;
}

}  // namespace kvanta::models
