// Fast hash of a checkpoint's weights, for files that belong to one model (scale files, page files).
#pragma once

#include <string>
#include <string_view>

#include "weights/safetensors.h"

namespace kvanta::models {

// "fnv1a-0123456789abcdef" over every tensor's name, dtype, shape, first and last 256 bytes, in the order of names.
// KV scale tensors are left out, so that a calibrated copy of a checkpoint is the same model.
std::string Fingerprint(const weights::Checkpoint& checkpoint);

// "xxh3-" and 32 digits over the bytes of all tensors but those of KV scales, and `config`, the text of config.json.
// Reads the whole checkpoint.
std::string ContentHash(const weights::Checkpoint& checkpoint, std::string_view config);

}  // namespace kvanta::models
