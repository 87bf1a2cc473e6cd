#include "models/fingerprint.h"

#include <fmt/format.h>

#include <algorithm>

#include "models/kv_scales.h"

namespace kvanta::models {

std::string Fingerprint(const Checkpoint& checkpoint) {
  constexpr size_t kEdge = 256;        // any training changes every tensor; whole files would cost seconds
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, 64 bits: tells models apart, does not authenticate them
  const auto add = [&hash](std::span<const uint8_t> bytes) {
    for (const uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3;
  };
  for (const auto& [name, tensor] : checkpoint.Tensors()) {
    if (IsKvScaleTensor(name)) continue;
    const std::string head = fmt::format("{}\n{} {}", name, tensor.dtype, ShapeText(tensor.shape));
    add({reinterpret_cast<const uint8_t*>(head.data()), head.size()});
    const size_t edge = std::min(kEdge, tensor.data.size());
    add(tensor.data.first(edge));
    add(tensor.data.last(edge));
  }
  return fmt::format("fnv1a-{:016x}", hash);
}

}  // namespace kvanta::models
