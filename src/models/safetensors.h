// Reader of safetensors files: u64 header length, JSON header, raw data; memory-mapped; every offset checked.
// Format: https://github.com/huggingface/safetensors (README, "Format").
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"

namespace kvanta::models {

struct TensorView {
  std::string dtype;  // as in the file: "BF16", "F16", "F32", "F8_E4M3", "I64", ...
  std::vector<int64_t> shape;
  std::span<const uint8_t> data;  // in the mapped file
};

// Parses a header held in memory: name -> view into `data`. Throws InputError on anything that lies: lengths, offsets
// out of range or overlapping, shapes whose product is not the byte count, duplicate names. For fuzzing and Open().
std::map<std::string, TensorView, std::less<>> ParseSafetensors(std::span<const uint8_t> file, const std::string& name);

// All tensors of a folder: model.safetensors, or the shards of model.safetensors.index.json.
class Checkpoint {
 public:
  static Checkpoint Open(const std::string& folder);
  const TensorView* Find(std::string_view name) const;  // nullptr when absent
  const TensorView& Get(std::string_view name) const;   // throws InputError naming the nearest names
  std::vector<std::string> Names() const;
  int64_t TotalBytes() const;

 private:
  struct Mapping;
  std::vector<std::shared_ptr<Mapping>> mappings_;
  std::map<std::string, TensorView, std::less<>> tensors_;
};

}  // namespace kvanta::models
