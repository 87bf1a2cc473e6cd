#include "models/fingerprint.h"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>

#include "models/kv_scales.h"

namespace kvanta::models {

std::string Fingerprint(const Checkpoint& checkpoint) {
  constexpr size_t kEdge = 256;  // any training changes every tensor; whole files would cost seconds
  XXH64_hash_t hash = 0;
  const auto add = [&hash](const void* data, size_t bytes) { hash = XXH3_64bits_withSeed(data, bytes, hash); };
  for (const auto& [name, tensor] : checkpoint.Tensors()) {
    if (IsKvScaleTensor(name)) continue;
    const std::string head = fmt::format("{}\n{} {}", name, tensor.dtype, ShapeText(tensor.shape));
    add(head.data(), head.size());
    const size_t edge = std::min(kEdge, tensor.data.size());
    add(tensor.data.first(edge).data(), edge);
    add(tensor.data.last(edge).data(), edge);
  }
  return fmt::format("xxh3-{:016x}", hash);
}

}  // namespace kvanta::models
