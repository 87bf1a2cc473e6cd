// Index of a model whose weights stay in GGUF files (docs/weights.md): Hugging Face's name of each tensor, and its
// place, type and shape. Written next to config.json when a GGUF file is first used.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace kvanta::weights {

struct GgufFile {
  std::string path;
  uint64_t size = 0;
  int64_t mtime_ns = 0;  // when the index was written
};

struct GgufTensor {
  size_t file = 0;                 // index in GgufIndex::files
  uint64_t offset = 0, bytes = 0;  // in the file
  std::string type;                // "F32", "Q4_0", ...: one of GgufTypes()
  std::vector<int64_t> shape;      // outermost first
  int64_t interleaved_heads = 0;   // WeightView::interleaved_heads
};

struct GgufIndex {
  std::vector<GgufFile> files;
  // A key with "*" stands for the tensors 0, 1, ... of its shape's first size (experts, heads), one after the other, or
  // "stride" bytes apart.
  std::map<std::string, GgufTensor, std::less<>> tensors;
  std::string converted;  // safetensors file in the same folder with tensors of other types; "" without one
};

inline constexpr const char* kGgufIndexFile = "model.gguf.index.json";

// Types of tensors that are used as they are stored.
std::vector<std::string> GgufTypes();

// Parses the text of an index and expands its "*". Throws InputError for unknown types, shapes that do not fit their
// type or heads, and tensors that end beyond the size of their file.
GgufIndex ParseGgufIndex(std::string_view text, const std::string& name);

}  // namespace kvanta::weights
