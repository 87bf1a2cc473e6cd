// A page of a KV cache group's layers as the cache holds it, to and from canonical bytes: the same cells in the same
// order and of the same sizes, each in its canonical form.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "formats/scheme.h"

namespace kvanta::formats {

enum class RecordKind : uint8_t {
  kQuantized,  // every layer of the group, in its formats
  kExact,      // the layers with exact pages, in bf16
};

int64_t RecordBytes(const CacheLayout& layout, int group, RecordKind kind) noexcept;

// `record` and the result are RecordBytes() long; anything else throws InputError.
std::vector<uint8_t> RecordToCanonical(const CacheLayout& layout, int group, RecordKind kind,
                                       std::span<const uint8_t> record);
std::vector<uint8_t> RecordFromCanonical(const CacheLayout& layout, int group, RecordKind kind,
                                         std::span<const uint8_t> canonical);

}  // namespace kvanta::formats
