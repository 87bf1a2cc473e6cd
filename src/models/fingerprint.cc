#include "models/fingerprint.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <memory>
#include <new>

#include "models/kv_scale_names.h"

namespace kvanta::models {

std::string Fingerprint(const weights::Checkpoint& checkpoint) {
  constexpr size_t kEdge = 256;        // any training changes every tensor; whole files would cost seconds
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, 64 bits: tells models apart, does not authenticate them
  const auto add = [&hash](std::span<const uint8_t> bytes) {
    for (const uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3;
  };
  for (const auto& [name, tensor] : checkpoint.Tensors()) {
    if (IsKvScaleTensor(name)) continue;
    const std::string head = fmt::format("{}\n{} {}", name, tensor.dtype, weights::ShapeText(tensor.shape));
    add({reinterpret_cast<const uint8_t*>(head.data()), head.size()});
    const size_t edge = std::min(kEdge, tensor.data.size());
    add(tensor.data.first(edge));
    add(tensor.data.last(edge));
  }
  return fmt::format("fnv1a-{:016x}", hash);
}

std::string ContentHash(const weights::Checkpoint& checkpoint, std::string_view config) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  if (state == nullptr) throw std::bad_alloc();
  XXH3_128bits_reset(state.get());
  XXH3_128bits_update(state.get(), config.data(), config.size());
  for (const auto& [name, tensor] : checkpoint.Tensors()) {
    if (IsKvScaleTensor(name)) continue;
    const std::string head = fmt::format("\n{}\n{} {}\n", name, tensor.dtype, weights::ShapeText(tensor.shape));
    XXH3_128bits_update(state.get(), head.data(), head.size());
    XXH3_128bits_update(state.get(), tensor.data.data(), tensor.data.size());
    checkpoint.Release(tensor);
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(state.get());
  return fmt::format("xxh3-{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace kvanta::models
