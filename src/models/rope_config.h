// The rope part of config.json, both generations: rope_theta + rope_scaling, or rope_parameters.
#pragma once

#include "models/config.h"
#include "models/json.h"

namespace kvanta::models {

inline constexpr int64_t kMaxPositions = int64_t{1} << 24;  // far above every model

// `max_position` is max_position_embeddings as config.json gives it.
RopeConfig ReadRopeConfig(const JsonObject& json, int64_t max_position);

// The longest context that the scaling was made for (max_position unless the type stretches it).
int64_t ScaledMaxPosition(const RopeConfig& rope, int64_t max_position);

}  // namespace kvanta::models
