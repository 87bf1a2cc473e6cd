// Reader of safetensors files: u64 header length, JSON header, raw data; memory-mapped; every offset checked.
// Format: https://github.com/huggingface/safetensors (README, "Format").
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"

namespace kvanta::weights {

struct TensorView {
  std::string dtype;  // as in the file: "BF16", "F16", "F32", "F8_E4M3", "I64", ...; or a GGUF type: "Q4_0", ...
  std::vector<int64_t> shape;
  std::span<const uint8_t> data;  // in the mapped file; not necessarily aligned to the element
  int64_t interleaved_heads = 0;  // WeightView::interleaved_heads
};

using TensorMap = std::map<std::string, TensorView, std::less<>>;

// Parses a file held in memory: name -> view into it. Throws InputError for lengths and offsets out of range, tensors
// that overlap or leave gaps, shapes whose product is not the byte count, duplicate names.
TensorMap ParseSafetensors(std::span<const uint8_t> file, const std::string& name);

// Text of a key of the file's __metadata__, of a file that ParseSafetensors accepts; nullopt without it.
std::optional<std::string> SafetensorsMetadata(std::span<const uint8_t> file, const std::string& name,
                                               const std::string& key);

// Shards of an index (the text of model.safetensors.index.json): tensor name -> file name in the same folder. Throws
// InputError on names that are not plain file names (a path could leave the folder).
std::map<std::string, std::string, std::less<>> ParseShardIndex(std::string_view text, const std::string& name);

// "[2, 3]"; "[]" for a scalar.
std::string ShapeText(std::span<const int64_t> shape);

// All tensors of a folder: those of the GGUF files in model.gguf.index.json (gguf_index.h), model.safetensors, the
// shards of model.safetensors.index.json, or all *.safetensors files.
class Checkpoint {
 public:
  static Checkpoint Open(const std::string& folder);
  // Tensors in memory that outlives the checkpoint. `name`: for messages.
  static Checkpoint OfTensors(TensorMap tensors, std::string name);
  // The checkpoint with each tensor "LAYER.`module`.PART.KIND" of `count` matrices, [count][...], as `count` tensors
  // "LAYER.`module`.experts.N.PART.KIND".
  Checkpoint SplitExperts(std::string_view module, int64_t count) const;
  // True if the folder has an index of GGUF files.
  static bool IsGgufFolder(const std::string& folder);
  // True if the folder has one of these.
  static bool Exists(const std::string& folder);
  const TensorView* Find(std::string_view name) const;  // nullptr when absent
  const TensorView& Get(std::string_view name) const;   // throws InputError naming the nearest names
  const TensorMap& Tensors() const { return tensors_; }
  std::vector<std::string> Names() const;
  int64_t TotalBytes() const;
  // The folder, or the GGUF file: for messages.
  const std::string& Name() const { return name_; }
  // True if the weights are those of GGUF files.
  bool IsGguf() const { return is_gguf_; }
  // Gives back the memory of a tensor's mapped pages; the page cache keeps them.
  void Release(const TensorView& tensor) const noexcept;
  // Likewise, for a tensor that has been copied. Evicts it from the page cache if memory does not hold both the files
  // and the copies: the kernel would reclaim the page cache in 4 KiB pages, and the copies would not get huge pages.
  void Evict(const TensorView& tensor) const noexcept;

 private:
  struct Mapping;
  // `replaces(tensor)`: true if this file's counts where another has the tensor, too; without it, that is an error.
  void AddFile(const std::string& path, const std::function<bool(const std::string&)>& replaces = nullptr);
  void AddShards(const std::string& folder, const std::string& index);
  void AddGgufIndex(const std::string& folder, const std::string& index);

  std::string name_;
  bool is_gguf_ = false;
  bool exceeds_memory_ = false;  // the files and a copy of them together
  std::vector<std::shared_ptr<Mapping>> mappings_;
  TensorMap tensors_;
};

}  // namespace kvanta::weights
