#include "engine/engine_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <span>
#include <string_view>
#include <type_traits>

#include "base/quote.h"
#include "engine/speculative_config.h"
#include "formats/format.h"
#include "kvanta/error.h"
#include "models/weight_count.h"
#include "store/redis_server.h"

namespace kvanta::engine {
namespace {

constexpr double kShareOfAvailable = 0.4;  // share of the free memory that is taken without kv_cache_memory_bytes

int ParseLayerIndex(const std::string& text, int layers) {
  int index = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
  if (error != std::errc() || end != text.data() + text.size() || index < -layers || index >= layers) {
    throw InputError(
        fmt::format("kv_cache_dtype_skip_layers: {} is neither a layer index from {} to {} nor "
                    "'sliding_window'",
                    Quote(text), -layers, layers - 1));
  }
  return index < 0 ? index + layers : index;
}

template <class T>
void CheckLimits(const char* option, T value, T min) {
  if (value < min) throw InputError(fmt::format("{} = {}: must be at least {}", option, value, min));
}
template <class T>
void CheckLimits(const char* option, T value, T min, T max) {
  if (!(value >= min && value <= max)) {
    throw InputError(fmt::format("{} = {}: must be between {} and {}", option, value, min, max));
  }
}

void CheckChoice(const char* option, const std::string& value, std::initializer_list<std::string_view> choices) {
  if (std::ranges::find(choices, value) != choices.end()) return;
  throw InputError(fmt::format("{} {} is unknown; there are: {}", option, Quote(value), fmt::join(choices, ", ")));
}

// Longest sequence, at most `limit` tokens, that fits in `budget_bytes` alone.
int64_t LongestSequence(const CacheSpecs& specs, int64_t budget_bytes, int64_t limit) {
  int64_t fits = 0;
  int64_t too_long = limit + 1;
  while (too_long - fits > 1) {
    const int64_t middle = fits + (too_long - fits) / 2;
    (specs.MaxBytes(middle) <= budget_bytes ? fits : too_long) = middle;
  }
  return fits;
}

// Compressed entries, and rows in a window, have no exact pages: a format that usually comes with some does without.
void DropExactPages(KvScheme& scheme) {
  const formats::Format& format = formats::Find(scheme.k.format);
  if (scheme.exact != format.exact || scheme.sink_pages != format.sink_pages) return;  // asked for: refused later
  scheme.exact = ExactPages::kNone;
  scheme.sink_pages = 0;
}

}  // namespace

DType ResolveDType(const std::string& dtype, const models::ModelConfig& model) {
  if (dtype != "auto") return ParseDType(dtype);
  if (!model.dtype_known) {
    throw InputError(
        "config.json has neither dtype nor torch_dtype, and there are no weights to read it from: choose a dtype: "
        "bfloat16, "
        "float16, float32");
  }
  return model.dtype;
}

kernels::WeightType ResolveWeights(const std::string& weight_dtype, DType dtype) {
  if (weight_dtype == "auto") return kernels::WeightTypeOf(dtype);
  if (weight_dtype == "bf16") return kernels::WeightType::kBf16;
  if (weight_dtype == "int8") return kernels::WeightType::kInt8;
  if (weight_dtype == "int4") return kernels::WeightType::kInt4;
  throw InputError(fmt::format("weight_dtype {} is not known; there are: auto, bf16, int8, int4", Quote(weight_dtype)));
}

bool KeepsQuantized(const std::string& weight_dtype, DType dtype) noexcept {
  return weight_dtype == "auto" && dtype != DType::kF32;
}

bool KeepsTypes(const std::string& dtype, const std::string& weight_dtype, const weights::Checkpoint& checkpoint) {
  return dtype == "auto" && weight_dtype == "auto" && checkpoint.IsGguf();
}

std::string_view UnquantizedScheme(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF32:
      return "fp32";
    case DType::kF16:
      return "fp16";
    case DType::kBf16:
      break;
  }
  return "bf16";
}

KvScheme ResolveBaseScheme(const EngineConfig& config, const models::ModelConfig& model, DType dtype) {
  const bool mla = model.UsesMla();
  if (config.kv_cache_dtype != "auto") return KvScheme::Parse(config.kv_cache_dtype, mla);
  if (!model.declared_kv_cache_error.empty()) {
    throw InputError(fmt::format("{}; kv_cache_dtype = auto follows the checkpoint: choose another, as int8, fp8 or {}",
                                 model.declared_kv_cache_error, UnquantizedScheme(dtype)));
  }
  return KvScheme::Parse(model.declared_kv_cache.empty() ? UnquantizedScheme(dtype) : model.declared_kv_cache, mla);
}

KvScheme ResolveIndexerScheme(const EngineConfig& config, const models::ModelConfig& model, DType dtype) {
  const auto is_quantized = [](const KvScheme& scheme) {
    return formats::Find(scheme.k.format).latents == formats::MlaSupport::kRequired;
  };
  std::string text = config.indexer_cache_dtype;
  if (text == "auto") {
    const KvScheme latents = ResolveBaseScheme(config, model, dtype);
    text = is_quantized(latents) ? "fp8" : latents.k.format;
  }
  KvScheme scheme = KvScheme::Parse(text, true);
  if (is_quantized(scheme) && text.find("hadamard") == std::string::npos) {
    scheme.k.hadamard = scheme.v.hadamard = true;
  }
  return scheme;
}

std::vector<KvScheme> ResolveSchemes(const EngineConfig& config, const models::ModelConfig& model, DType dtype) {
  const std::string unquantized(UnquantizedScheme(dtype));
  std::vector<int> attention_layers;
  const int layers = model.KvLayers();
  for (int layer = 0; layer < layers; ++layer) {
    if (!model.layer_specs[static_cast<size_t>(layer)].IsRecurrent()) attention_layers.push_back(layer);
  }
  std::vector<KvScheme> schemes =
      ParseLayerSchemes(ResolveBaseScheme(config, model, dtype), "", layers, attention_layers);
  if (config.kv_cache_dtype == "auto") {
    for (size_t layer = 0; layer < std::min(schemes.size(), model.declared_kv_cache_layers.size()); ++layer) {
      const std::string& declared = model.declared_kv_cache_layers[layer];
      if (!declared.empty()) schemes[layer] = KvScheme::Parse(declared, model.UsesMla());
    }
  }
  schemes = OverrideLayerSchemes(std::move(schemes), config.kv_cache_dtype_layers, model.UsesMla());
  for (const std::string& entry : config.kv_cache_dtype_skip_layers) {
    if (entry == "sliding_window") {
      const std::vector<int> windows = model.SlidingWindows();
      for (size_t layer = 0; layer < schemes.size(); ++layer) {
        if (windows[layer] > 0) schemes[layer] = KvScheme::Parse(unquantized);
      }
    } else {
      schemes[static_cast<size_t>(ParseLayerIndex(entry, layers))] = KvScheme::Parse(unquantized);
    }
  }
  for (size_t layer = 0; layer < schemes.size(); ++layer) {
    if (model.layer_specs[layer].IsRecurrent()) schemes[layer] = KvScheme::Parse(unquantized);
  }
  if (model.SharesKv()) std::ranges::for_each(schemes, DropExactPages);
  const std::vector<models::LayerSpec> cached = model.CachedLayers();
  for (size_t layer = schemes.size(); layer < cached.size(); ++layer) {
    if (cached[layer].IsRecurrent()) {
      schemes.push_back(KvScheme::Parse(unquantized));
    } else if (cached[layer].keys_only) {
      schemes.push_back(ResolveIndexerScheme(config, model, dtype));
      if (model.SharesKv()) DropExactPages(schemes.back());
    } else {  // entries
      schemes.push_back(schemes[static_cast<size_t>(cached[layer].compressed_layer)]);
    }
  }
  return schemes;
}

std::vector<cache::Visibility> LayerVisibility(const models::ModelConfig& model) {
  std::vector<cache::Visibility> layers;
  for (const models::LayerSpec& layer : model.CachedLayers()) layers.push_back(layer.visibility);
  return layers;
}

std::vector<int> GroupsOf(const std::vector<KvScheme>& schemes, const models::ModelConfig& model) {
  const std::vector<cache::Visibility> layers = LayerVisibility(model);
  const auto with_kv = static_cast<size_t>(model.KvLayers());
  std::vector<int> groups = cache::GroupLayers(std::span(schemes).first(with_kv), std::span(layers).first(with_kv));
  const int first = *std::ranges::max_element(groups) + 1;
  for (const int group : cache::GroupLayers(std::span(schemes).subspan(with_kv), std::span(layers).subspan(with_kv))) {
    groups.push_back(first + group);
  }
  return groups;
}

formats::StateRounding StateRoundingOf(const EngineConfig& config) {
  constexpr int kLargestPage = 128;  // every page size divides it; others are errors of their own
  const bool is_page_size = config.page_size > 0 && kLargestPage % config.page_size == 0;
  if (is_page_size && config.state_grid % config.page_size != 0) {
    throw InputError(
        fmt::format("state_grid = {}: must be a multiple of the page size, {}", config.state_grid, config.page_size));
  }
  return {.code = formats::ParseStateCode(config.state_cache_dtype), .grid = config.state_grid};
}

formats::CacheLayout PlanLayout(const std::vector<KvScheme>& schemes, const models::ModelConfig& model, int page_size,
                                const formats::StateRounding& states, const std::vector<int>& groups) {
  std::vector<formats::LayerShape> shapes;
  for (const models::LayerSpec& layer : model.CachedLayers()) {
    if (layer.IsRecurrent()) {
      shapes.push_back({.kv_heads = 0, .head_dim = layer.head_dim, .state = model.State(layer)});
    } else if (layer.keys_only) {
      shapes.push_back(
          {.kv_heads = layer.kv_heads, .head_dim = layer.head_dim, .keys_only = true, .row_tokens = layer.row_tokens});
    } else if (model.SharesKv()) {
      const bool entries = layer.compressed_layer >= 0;
      shapes.push_back({.kv_heads = layer.kv_heads,
                        .head_dim = layer.head_dim,
                        .shared_kv = true,
                        .row_tokens = entries ? layer.row_tokens : 1});
    } else {
      shapes.push_back({layer.kv_heads, layer.head_dim, model.mla.qk_rope_head_dim});
    }
  }
  return formats::PlanCache(schemes, shapes, page_size, groups.empty() ? GroupsOf(schemes, model) : groups, states);
}

void CheckConfig(const EngineConfig& config) {
  EngineConfig::VisitOptions([&](const char* option, auto member, auto... limits) {
    if constexpr (sizeof...(limits) > 0) {
      using T = std::remove_cvref_t<decltype(config.*member)>;
      CheckLimits<T>(option, config.*member, static_cast<T>(limits)...);
    }
  });
  if (config.max_step_ms && !(std::isfinite(*config.max_step_ms) && *config.max_step_ms >= 0)) {
    throw InputError(fmt::format("max_step_ms = {}: must be finite and at least 0 (no limit)", *config.max_step_ms));
  }
  StateRoundingOf(config);
  CheckChoice("scheduling_policy", config.scheduling_policy, {"shortest", "fcfs", "priority"});
  CheckChoice("fair_by", config.fair_by, {"none", "user", "api-key"});
  if (config.max_num_batched_tokens < config.page_size) {
    throw InputError(fmt::format("max_num_batched_tokens = {}: must be at least the page size, {}",
                                 config.max_num_batched_tokens, config.page_size));
  }
  if (config.kv_offload_bytes > 0) {
    if (config.device != "cuda") {
      throw InputError(
          fmt::format("kv_offload_bytes = {}: keeps a GPU's pages in RAM (device cuda); on a CPU the cache is in RAM: "
                      "give these bytes to kv_cache_memory_bytes",
                      config.kv_offload_bytes));
    }
    if (!config.enable_prefix_caching) {
      throw InputError(fmt::format("kv_offload_bytes = {}: needs enable_prefix_caching", config.kv_offload_bytes));
    }
  }
  if (!config.kv_cache_dir.empty() && !config.enable_prefix_caching) {
    throw InputError(fmt::format("kv_cache_dir = {}: needs enable_prefix_caching", Quote(config.kv_cache_dir)));
  }
  if (!config.kv_store.empty()) {
    store::CheckServerUrl(config.kv_store);
    if (!config.enable_prefix_caching) {
      throw InputError(
          fmt::format("kv_store = {}: needs enable_prefix_caching", Quote(store::RedactUrl(config.kv_store))));
    }
  }
  CheckChoice("role", config.role, {"both", "prefill", "decode"});
  if (config.role != "both" && config.kv_store.empty() && config.kv_cache_dir.empty()) {
    throw InputError(
        fmt::format("role = {}: needs kv_store or kv_cache_dir, where prompts' pages are passed on", config.role));
  }
  if (config.kv_events_queue_size > 0 && !config.enable_prefix_caching) {
    throw InputError("KV events need enable_prefix_caching: without it there are no pages to announce");
  }
  if (!config.speculative_config.empty()) ParseSpeculativeConfig(config.speculative_config);
  if (config.device != "auto" && config.device != "cpu" && config.device != "cuda") {
    throw InputError(fmt::format("device {} is unknown; there are: auto, cpu, cuda", Quote(config.device)));
  }
}

int64_t MaxLogitRows(const EngineConfig& config) noexcept {
  return std::clamp<int64_t>(config.max_num_seqs, 16, 256);
}

int64_t CacheSpecs::DraftBytes(int64_t budget_bytes, int64_t tokens) const noexcept {
  if (draft == nullptr) return 0;
  const double share = static_cast<double>(draft->MaxBytes(tokens)) / static_cast<double>(MaxBytes(tokens));
  const int64_t fewest = draft->MinCacheBytes(tokens);
  return std::clamp(static_cast<int64_t>(static_cast<double>(budget_bytes) * share), fewest,
                    std::max(fewest, budget_bytes - target.MinCacheBytes(tokens)));
}

CacheSize SizeCache(const EngineConfig& config, const CacheSpecs& specs, int64_t model_max_position,
                    int64_t available_bytes) {
  if (config.max_model_len > model_max_position) {
    throw InputError(
        fmt::format("max_model_len = {}: the model's limit is {} tokens", config.max_model_len, model_max_position));
  }
  const int64_t requested = config.max_model_len > 0 ? config.max_model_len : model_max_position;
  CacheSize size;
  if (config.kv_cache_memory_bytes > 0) {
    size.budget_bytes = config.kv_cache_memory_bytes;
    if (size.budget_bytes > available_bytes) {
      throw ResourceError(fmt::format("kv_cache_memory_bytes = {} ({}): only {} of memory are available",
                                      size.budget_bytes, FormatBytes(size.budget_bytes), FormatBytes(available_bytes)));
    }
  } else {
    // Pages that a step holds beyond those that stay: exact ones until they close, windowed ones until they are passed.
    const int64_t step_pages = config.max_num_batched_tokens / specs.target.page_size + 1;
    const auto share = static_cast<int64_t>(kShareOfAvailable * static_cast<double>(available_bytes));
    const int64_t steps = specs.MaxBytes(requested, 1 + step_pages) - specs.MaxBytes(requested);
    int64_t all = 0;
    const int64_t of_sequence =
        specs.MaxBytes(requested) - specs.target.MaxBytes(requested) + specs.target.MaxFirstLevelBytes(requested);
    if (__builtin_mul_overflow(config.max_num_seqs, of_sequence, &all)) all = share;
    size.budget_bytes = std::min(all, share - std::min(steps, share)) + std::min(steps, share);
    size.budget_bytes = std::max(size.budget_bytes, std::min(specs.MinCacheBytes(requested), share));
  }
  const int64_t longest = LongestSequence(specs, size.budget_bytes, requested);
  size.max_model_len = longest;
  if (longest == requested) return size;
  const std::string figures = fmt::format(
      "a cache of {} bytes holds one sequence of {} tokens, not {}; that needs {} bytes (kv_cache_memory_bytes), a "
      "smaller max_model_len, or a format with fewer bits (kv_cache_dtype)",
      size.budget_bytes, longest, requested, specs.MaxBytes(requested));
  if (config.max_model_len == 0 && longest >= specs.target.page_size) {
    size.warning = fmt::format("max_model_len is {}: {}", longest, figures);
    return size;
  }
  if (config.kv_cache_memory_bytes > 0) throw InputError(figures);
  throw ResourceError(figures);
}

std::shared_ptr<store::HostArena> ReserveHostMemory(const EngineConfig& config, const formats::CacheLayout& layout,
                                                    Device& device) {
  if (config.kv_offload_bytes == 0) return nullptr;
  int64_t longest = 0;
  for (const formats::GroupBytes& group : layout.groups) {
    for (const cache::PageKind kind : cache::kPageKinds) longest = std::max(longest, cache::BytesOf(group, kind));
  }
  if (config.kv_offload_bytes < longest) {
    throw InputError(
        fmt::format("kv_offload_bytes = {}: one page of {} tokens takes {} bytes; give more than kv_cache_memory_bytes",
                    config.kv_offload_bytes, layout.page_size, longest));
  }
  try {
    return store::HostArena::Make(device, config.kv_offload_bytes);
  } catch (const ResourceError& error) {
    throw ResourceError(fmt::format("kv_offload_bytes = {}: {}", config.kv_offload_bytes, error.what()));
  }
}

}  // namespace kvanta::engine
