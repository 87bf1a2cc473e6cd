#include "engine/speculative_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "base/quote.h"
#include "kvanta/error.h"
#include "models/json.h"

namespace kvanta::engine {
namespace {

constexpr const char* kName = "speculative_config";
constexpr int64_t kMaxDraftTokens = 32;
constexpr int64_t kMaxLookup = 64;
constexpr std::array<std::string_view, 4> kKeys = {"method", "num_speculative_tokens", "prompt_lookup_max",
                                                   "prompt_lookup_min"};

}  // namespace

SpeculativeConfig ParseSpeculativeConfig(const std::string& text) {
  const models::Json json = models::ParseJson(text, kName);
  const models::JsonObject object(json, kName);
  for (const auto& [key, value] : json.items()) {
    if (std::ranges::find(kKeys, key) != kKeys.end()) continue;
    throw InputError(fmt::format("{}: key {} is not known; there are: {}", kName, Quote(key), fmt::join(kKeys, ", ")));
  }
  const std::string method = object.String("method", "ngram");
  if (method != "ngram") {
    throw InputError(fmt::format("{}: method {} is not supported; there are: ngram", kName, Quote(method)));
  }
  SpeculativeConfig config;
  config.num_speculative_tokens =
      static_cast<int>(object.Int("num_speculative_tokens", 1, kMaxDraftTokens, config.num_speculative_tokens));
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
