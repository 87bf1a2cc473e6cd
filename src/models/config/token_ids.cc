#include "models/config/token_ids.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

namespace kvanta::models {
namespace {

// nullopt outside the vocabulary.
std::optional<int32_t> TokenId(const Json& id, int vocab) {
  const bool fits = id.is_number_unsigned() && id.get<uint64_t>() < static_cast<uint64_t>(vocab);
  return fits ? std::optional(static_cast<int32_t>(id.get<uint64_t>())) : std::nullopt;
}

}  // namespace

void AddEosIds(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kKey = "eos_token_id";
  const Json* ids = json.Find(kKey);
  if (ids == nullptr) return;
  const Json list = ids->is_array() ? *ids : Json::array({*ids});
  for (const Json& id : list) {
    if (!id.is_number_integer()) json.Fail(kKey, fmt::format("token ids below vocab_size ({})", config.vocab));
    const std::optional<int32_t> found = TokenId(id, config.vocab);
    if (!found) continue;
    const int32_t token = *found;
    auto& known = config.eos_token_ids;
    if (std::find(known.begin(), known.end(), token) == known.end()) known.push_back(token);
  }
}

int32_t ReadBosId(const JsonObject& json, int vocab) {
  constexpr const char* kKey = "bos_token_id";
  const Json* id = json.Find(kKey);
  if (id == nullptr) return -1;
  if (id->is_array() && !id->empty()) id = &id->front();
  if (!id->is_number_integer()) json.Fail(kKey, fmt::format("a token id below vocab_size ({})", vocab));
  return TokenId(*id, vocab).value_or(-1);
}

}  // namespace kvanta::models
