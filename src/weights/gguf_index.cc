#include "weights/gguf_index.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "base/json.h"
#include "base/quote.h"
#include "kvanta/error.h"
#include "weights/block_format.h"
#include "weights/safetensors.h"

namespace kvanta::weights {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 40, kMaxOffset = int64_t{1} << 60;
constexpr size_t kMaxDimensions = 4;
constexpr size_t kMaxTensors = size_t{1} << 18;  // experts included

struct Element {
  std::string_view name;
  int64_t bytes;
};
constexpr std::array kElements = {Element{"F32", 4}, Element{"F16", 2}, Element{"BF16", 2}};

// Weights of a block; 1 for elements.
int64_t BlockSize(std::string_view type) {
  return BlockWeights(FindBlockFormat(type));
}

// Bytes of `count` values along a row, a multiple of BlockSize(type).
int64_t BytesOfRow(std::string_view type, int64_t count) {
  for (const Element& element : kElements) {
    if (element.name == type) return count * element.bytes;
  }
  return RowBytes(FindBlockFormat(type), count);
}

std::vector<GgufFile> ReadFiles(const JsonObject& root) {
  const Json& list = root.Get("files");
  if (!list.is_array() || list.empty()) root.Fail("files", "a list of GGUF files");
  std::vector<GgufFile> files;
  for (const Json& value : list) {
    const JsonObject file(value, root.File(), fmt::format("files.{}", files.size()));
    files.push_back({.path = file.String("path"),
                     .size = static_cast<uint64_t>(file.Int("size", 0, kMaxOffset)),
                     .mtime_ns = file.Int("mtime_ns", 0, std::numeric_limits<int64_t>::max())});
    if (files.back().path.find('\0') != std::string::npos) file.Fail("path", "the path of a GGUF file");
  }
  return files;
}

std::string ReadTensorType(const JsonObject& entry) {
  std::string type = entry.String("type");
  const std::vector<std::string> known = GgufTypes();
  if (std::find(known.begin(), known.end(), type) == known.end()) {
    entry.Fail("type", fmt::format("one of {}", fmt::join(known, ", ")));
  }
  return type;
}

std::vector<int64_t> ReadTensorShape(const JsonObject& entry) {
  const Json& list = entry.Get("shape");
  std::vector<int64_t> shape;
  bool valid = list.is_array() && !list.empty() && list.size() <= kMaxDimensions;
  if (valid) {
    for (const Json& size : list) {
      valid = valid && size.is_number_unsigned() && size.get<uint64_t>() >= 1 && size.get<uint64_t>() <= kMaxSize;
      if (valid) shape.push_back(static_cast<int64_t>(size.get<uint64_t>()));
    }
  }
  if (!valid) entry.Fail("shape", fmt::format("1 to {} positive sizes", kMaxDimensions));
  return shape;
}

uint64_t ReadBytes(const JsonObject& entry, const GgufTensor& tensor) {
  if (tensor.shape.back() % BlockSize(tensor.type) != 0) {
    entry.Fail("shape", fmt::format("rows of whole blocks of {}", BlockSize(tensor.type)));
  }
  auto total = static_cast<uint64_t>(BytesOfRow(tensor.type, tensor.shape.back()));
  for (size_t i = 0; i + 1 < tensor.shape.size(); ++i) {
    if (__builtin_mul_overflow(total, static_cast<uint64_t>(tensor.shape[i]), &total) || total > kMaxOffset) {
      throw InputError(
          fmt::format("{} is {}: more bytes than any file has", entry.Name("shape"), ShapeText(tensor.shape)));
    }
  }
  return total;
}

GgufTensor ReadTensor(const JsonObject& entry, const std::vector<GgufFile>& files) {
  GgufTensor tensor;
  tensor.file = static_cast<size_t>(entry.Int("file", 0, std::ssize(files) - 1, 0));
  tensor.offset = static_cast<uint64_t>(entry.Int("offset", 0, kMaxOffset));
  tensor.type = ReadTensorType(entry);
  tensor.shape = ReadTensorShape(entry);
  tensor.bytes = ReadBytes(entry, tensor);
  const GgufFile& file = files[tensor.file];
  if (tensor.offset + tensor.bytes > file.size) {
    throw InputError(fmt::format("{} is {}: {} bytes of {} {} end beyond the {} bytes of {}", entry.Name("offset"),
                                 tensor.offset, tensor.bytes, tensor.type, ShapeText(tensor.shape), file.size,
                                 Sanitize(file.path)));
  }
  tensor.interleaved_heads = entry.Int("interleaved_heads", 0, kMaxSize, 0);
  if (tensor.interleaved_heads != 0 && tensor.shape.front() % (2 * tensor.interleaved_heads) != 0) {
    entry.Fail("interleaved_heads", fmt::format("heads of an even size in {} rows", tensor.shape.front()));
  }
  return tensor;
}

// Bytes from the beginning of a tensor to that of the next, of the `count` that an entry with "*" stands for.
uint64_t ReadStride(const JsonObject& entry, const GgufTensor& first, int64_t count, uint64_t file_size) {
  const auto stride = static_cast<uint64_t>(
      entry.Int("stride", static_cast<int64_t>(first.bytes), kMaxOffset, static_cast<int64_t>(first.bytes)));
  const uint64_t rest = file_size - first.offset - first.bytes;  // after the first one
  if (count > 1 && stride > rest / static_cast<uint64_t>(count - 1)) {
    throw InputError(fmt::format("{} is {}: {} tensors at this distance end beyond the {} bytes of their file",
                                 entry.Name("stride"), stride, count, file_size));
  }
  return stride;
}

void CheckCount(const JsonObject& root, size_t count) {
  if (count > kMaxTensors) {
    throw InputError(fmt::format("{}: {} tensors; at most {} are read", root.File(), count, kMaxTensors));
  }
}

void Add(const JsonObject& root, const std::string& name, GgufTensor tensor, GgufIndex& index) {
  if (!index.tensors.emplace(name, std::move(tensor)).second) {
    throw InputError(fmt::format("{}: tensor {} is there twice", root.File(), Quote(name)));
  }
}

}  // namespace

std::vector<std::string> GgufTypes() {
  std::vector<std::string> names;
  for (const Element& element : kElements) names.emplace_back(element.name);
  for (int format = 1; format < kBlockFormats; ++format) {
    names.emplace_back(Name(static_cast<BlockFormat>(format)));
  }
  return names;
}

GgufIndex ParseGgufIndex(std::string_view text, const std::string& name) {
  const Json json = ParseJson(text, name);
  const JsonObject root(json, name);
  GgufIndex index;
  index.files = ReadFiles(root);
  index.converted = root.String("converted", "");
  const JsonObject tensors = root.Object("tensors");
  for (const auto& [key, value] : tensors.Value().items()) {
    const JsonObject entry(value, name, "tensors." + key);
    GgufTensor tensor = ReadTensor(entry, index.files);
    const size_t star = key.find('*');
    if (star == key.npos) {
      CheckCount(root, index.tensors.size() + 1);
      Add(root, key, std::move(tensor), index);
      continue;
    }
    if (tensor.shape.size() < 2) entry.Fail("shape", "the number of tensors, and the shape of each");
    if (tensor.interleaved_heads != 0) entry.Fail("interleaved_heads", "0 for several tensors");
    const int64_t count = tensor.shape.front();
    CheckCount(root, index.tensors.size() + static_cast<size_t>(count));
    tensor.shape.erase(tensor.shape.begin());
    tensor.bytes /= static_cast<uint64_t>(count);
    const uint64_t stride = ReadStride(entry, tensor, count, index.files[tensor.file].size);
    for (int64_t i = 0; i < count; ++i, tensor.offset += stride) {
      Add(root, fmt::format("{}{}{}", key.substr(0, star), i, key.substr(star + 1)), tensor, index);
    }
  }
  return index;
}

}  // namespace kvanta::weights
