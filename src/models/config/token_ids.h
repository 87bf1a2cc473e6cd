// Token ids in config.json and generation_config.json.
#pragma once

#include "base/json.h"
#include "models/config/config.h"

namespace kvanta::models {

// Adds eos_token_id: one id, a list, or none. Ids outside the vocabulary, such as -1, are never sampled and left out.
void AddEosIds(const JsonObject& json, ModelConfig& config);

// bos_token_id, or the first of a list; -1 for none, and for one outside the vocabulary.
int32_t ReadBosId(const JsonObject& json, int vocab);

}  // namespace kvanta::models
