// EngineConfig::speculative_config: JSON with the keys of vLLM's --speculative-config.
#pragma once

#include <string>

namespace kvanta::engine {

struct SpeculativeConfig {
  bool mtp = false;                     // the checkpoint's own layers predict tokens (MTP)
  std::string model;                    // folder of the draft model; "": n-grams, or `mtp`
  std::string kv_cache_dtype = "int8";  // format of the cache of a draft model or of MTP
  int num_speculative_tokens = 0;       // maximum draft tokens of a sequence in a step
  int prompt_lookup_min = 2;            // shortest n-gram that is looked up
  int prompt_lookup_max = 4;            // longest
};

// Throws InputError with the key, its value and the alternatives. `text` is not empty.
SpeculativeConfig ParseSpeculativeConfig(const std::string& text);

}  // namespace kvanta::engine
