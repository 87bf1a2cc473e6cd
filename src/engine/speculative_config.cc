#include "engine/speculative_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/json.h"
#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta::engine {
namespace {

constexpr const char* kName = "speculative_config";
constexpr int64_t kMaxDraftTokens = 32;
constexpr int64_t kNgramDraftTokens = 16;  // only after long matches
constexpr int64_t kModelDraftTokens = 4;   // each takes a pass
constexpr int64_t kMtpDraftTokens = 3;     // each but the first takes a pass
constexpr int64_t kMaxLookup = 64;
constexpr std::array<std::string_view, 3> kMethods = {"ngram", "draft_model", "mtp"};
// vLLM's names of mtp for some models.
constexpr std::array<std::string_view, 6> kMtpNames = {"qwen3_next_mtp", "qwen3_5_mtp",       "glm4_moe_mtp",
                                                       "deepseek_mtp",   "glm4_moe_lite_mtp", "nextn"};
// Keys of every method, then those of one alone.
constexpr std::array<std::string_view, 2> kKeys = {"method", "num_speculative_tokens"};
constexpr std::array<std::string_view, 2> kNgramKeys = {"prompt_lookup_max", "prompt_lookup_min"};
constexpr std::array<std::string_view, 2> kModelKeys = {"model", "kv_cache_dtype"};
constexpr std::array<std::string_view, 1> kMtpKeys = {"kv_cache_dtype"};

bool Contains(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

// A model alone asks for a draft model. As in vLLM, the method may stand in its place.
std::string MethodOf(const JsonObject& object) {
  const std::string model = object.String("model", "");
  const bool names_method = model == "ngram";
  std::string method = object.String("method", model.empty() || names_method ? "ngram" : "draft_model");
  if (Contains(kMtpNames, method)) method = "mtp";
  if (!Contains(kMethods, method)) {
    throw InputError(
        fmt::format("{}: method {} is not supported; there are: {}", kName, Quote(method), fmt::join(kMethods, ", ")));
  }
  return method;
}

void CheckKeys(const Json& json, const std::string& method) {
  const bool is_ngram = method == "ngram";
  std::span<const std::string_view> own = kModelKeys;
  if (is_ngram) own = kNgramKeys;
  if (method == "mtp") own = kMtpKeys;
  for (const auto& [key, value] : json.items()) {
    const bool names_method = is_ngram && key == "model" && value == "ngram";
    if (Contains(kKeys, key) || Contains(own, key) || names_method) continue;
    const bool is_known = Contains(kNgramKeys, key) || Contains(kModelKeys, key);
    throw InputError(fmt::format("{}: key {} is not {}; there are: {}, {}", kName, Quote(key),
                                 is_known ? fmt::format("one of method {}", method) : "known", fmt::join(kKeys, ", "),
                                 fmt::join(own, ", ")));
  }
}

}  // namespace

SpeculativeConfig ParseSpeculativeConfig(const std::string& text) {
  const Json json = ParseJson(text, kName);
  const JsonObject object(json, kName);
  const std::string method = MethodOf(object);
  CheckKeys(json, method);
  SpeculativeConfig config;
  const int64_t default_tokens = method == "ngram" ? kNgramDraftTokens
                                 : method == "mtp" ? kMtpDraftTokens
                                                   : kModelDraftTokens;
  config.num_speculative_tokens =
      static_cast<int>(object.Int("num_speculative_tokens", 1, kMaxDraftTokens, default_tokens));
  config.mtp = method == "mtp";
  if (method != "ngram") {
    config.model = object.String("model", "");
    if (config.model.empty() && !config.mtp) {
      throw InputError(fmt::format("{}: method draft_model needs the key model, the draft model's folder", kName));
    }
    config.kv_cache_dtype = object.String("kv_cache_dtype", config.kv_cache_dtype);
    return config;
  }
  // One bound alone is both, as in vLLM.
  const bool has_min = object.Has("prompt_lookup_min");
  const bool has_max = object.Has("prompt_lookup_max");
  if (has_min) config.prompt_lookup_min = static_cast<int>(object.Int("prompt_lookup_min", 1, kMaxLookup));
  config.prompt_lookup_max = static_cast<int>(
      object.Int("prompt_lookup_max", 1, kMaxLookup, has_min ? config.prompt_lookup_min : config.prompt_lookup_max));
  if (has_max && !has_min) config.prompt_lookup_min = config.prompt_lookup_max;
  if (config.prompt_lookup_min > config.prompt_lookup_max) {
    throw InputError(fmt::format("{}: prompt_lookup_min {} is above prompt_lookup_max {}", kName,
                                 config.prompt_lookup_min, config.prompt_lookup_max));
  }
  return config;
}

}  // namespace kvanta::engine
