// The rope part of config.json, both generations: rope_theta + rope_scaling, or rope_parameters.
#pragma once

#include "base/json.h"
#include "models/config/config.h"

namespace kvanta::models {

inline constexpr int64_t kMaxPositions = int64_t{1} << 24;  // far above every model
inline constexpr double kDefaultTheta = 10000.0;

// Heads of `head_dim` channels are rotated whole, or with `partial` as far as partial_rotary_factor says.
// `max_position` is max_position_embeddings as config.json gives it, `theta` the class's default of rope_theta.
RopeSpec ReadRopeSpec(const JsonObject& json, int head_dim, int64_t max_position, double theta = kDefaultTheta,
                      bool partial = false);

// The object `rope` alone: a value of rope_parameters by layer type. Heads are rotated whole, or as far as its
// partial_rotary_factor says, whose default is `partial`, if that is not 0.
RopeSpec ReadRopeParameters(const JsonObject& rope, int head_dim, int64_t max_position, double theta,
                            double partial = 0);

// The value of rope_parameters for layers of `type`, "full_attention" or "sliding_attention"; the default rope where it
// is absent.
RopeSpec ReadRopeOfLayers(const JsonObject& json, std::string_view type, int head_dim, int64_t max_position,
                          double theta, double partial = 0);

// Default of a rope_parameters by layer type.
struct RopeDefault {
  double theta = kDefaultTheta;
  double partial = 1;  // part of a head that is rotated
};

// Sets the ropes of layers with full attention and of those with a window, and the longest context: from
// rope_parameters by layer type, or these where it is absent.
void ReadRopesByLayerType(const JsonObject& json, const RopeDefault& full, const RopeDefault& sliding,
                          ModelConfig& config);

// max_position_embeddings, at most kMaxPositions.
int64_t ReadMaxPosition(const JsonObject& json);

// A key with the base of the frequencies.
double ReadTheta(const JsonObject& json, std::string_view key, double missing);

// True if rope_parameters has ropes by layer type.
bool HasRopesByLayerType(const JsonObject& json);

// Sets the rope of all layers, and the longest context: the one that the scaling was made for.
void SetRope(const RopeSpec& rope, int64_t max_position, ModelConfig& config);

}  // namespace kvanta::models
