// Names of KV scales in checkpoints (docs/scales.md, "Names in checkpoints").
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace kvanta::models {

enum class ScaleRole : uint8_t {
  kK,
  kV,
  kBoth,
  kZero,      // zero point of an affine quantizer: must be 0, the formats are symmetric
  kKeyMean,   // Kvanta's own, or ModelOpt's bias of K: subtracted from K by +mean
  kKeyQuery,  // with kKeyEigen: Kvanta's own, for +query
  kKeyEigen,
  kValueBias,  // ModelOpt's bias of V
  kInt8K,      // scales [channels] of an INT8 cache (C8), and their zero points
  kInt8V,
  kInt8KOffset,
  kInt8VOffset,
  kIgnored,  // scales of queries and probabilities, which are not cached, and of whole tensors in NVFP4
};

// Role of a tensor by the last components of its name; nullopt for a name outside the table.
std::optional<ScaleRole> RoleOf(std::string_view tensor);

// True for names of KV scales (read or deliberately ignored), which are not weights.
bool IsKvScaleTensor(std::string_view tensor);

// True for a last component that can only be a KV scale: under a name outside the table, an error.
bool LooksLikeKvScale(std::string_view tensor);

}  // namespace kvanta::models
