#include "engine/whole_sequences.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "kvanta/error.h"

namespace kvanta::engine {

void ComputeSequencesWhole(const models::ModelConfig& model, EngineConfig& config) {
  if (!model.AttendsInBothDirections()) return;
  const auto refuse = [&](std::string_view option) {
    throw InputError(fmt::format("{}: not supported by {}, whose attention goes in both directions; leave it out",
                                 option, model.architecture));
  };
  if (config.pipeline_parallel_size > 1) refuse("pipeline_parallel_size");
  if (!config.kv_cache_dir.empty()) refuse("kv_cache_dir");
  if (!config.kv_store.empty()) refuse("kv_store");
  if (config.kv_events_queue_size > 0) refuse("kv_events");
  config.enable_prefix_caching = false;  // a page would depend on the tokens after it
  const int64_t longest =
      config.max_model_len > 0 ? std::min(config.max_model_len, model.max_position) : model.max_position;
  constexpr int64_t kMax = std::numeric_limits<int>::max();
  config.max_num_batched_tokens = static_cast<int>(std::clamp<int64_t>(longest, config.max_num_batched_tokens, kMax));
}

}  // namespace kvanta::engine
