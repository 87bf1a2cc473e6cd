#include "weights/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/json.h"
#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta::weights {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr std::string_view kGitLfsPointer = "version https://git-lfs.github.com/spec/";
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's limit

struct ElementType {
  std::string_view name;
  uint64_t bits;
};

constexpr std::array kElementTypes = std::to_array<ElementType>(
    {{"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6},     {"F6_E3M2", 6},     {"U8", 8},   {"I8", 8},
     {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E5M2FNUZ", 8}, {"F8_E4M3FNUZ", 8}, {"I16", 16}, {"U16", 16},
     {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32}, {"C64", 64},
     {"F64", 64},    {"F8_E8M0", 8}, {"I64", 64},        {"U64", 64}});

uint64_t BitsOf(const std::string& dtype, const JsonObject& tensor) {
  for (const ElementType& type : kElementTypes) {
    if (type.name == dtype) return type.bits;
  }
  std::vector<std::string_view> names;
  for (const ElementType& type : kElementTypes) names.push_back(type.name);
  tensor.Fail("dtype", fmt::format("one of {}", fmt::join(names, ", ")));
}

uint64_t ReadLength(std::span<const uint8_t> file) {
  uint64_t length = 0;
  for (uint64_t i = 0; i < kLengthBytes; ++i) length |= uint64_t{file[i]} << (8 * i);
  return length;
}

std::vector<int64_t> ReadShape(const JsonObject& tensor) {
  const Json* shape = tensor.Find("shape");
  std::vector<int64_t> sizes;
  bool valid = shape != nullptr && shape->is_array();
  if (valid) {
    for (const Json& size : *shape) {
      valid = valid && size.is_number_unsigned() && size.get<uint64_t>() < (uint64_t{1} << 62);
      if (valid) sizes.push_back(static_cast<int64_t>(size.get<uint64_t>()));
    }
  }
  if (!valid) tensor.Fail("shape", "a list of sizes");
  return sizes;
}

// Bytes of the tensor by its dtype and shape. No product may overflow.
uint64_t BytesOf(const std::vector<int64_t>& shape, uint64_t bits, const JsonObject& tensor) {
  uint64_t total = bits;
  for (const int64_t size : shape) {
    if (__builtin_mul_overflow(total, static_cast<uint64_t>(size), &total)) {
      throw InputError(
          fmt::format("{} is {}: more bits than 64 bits can count", tensor.Name("shape"), ShapeText(shape)));
    }
  }
  if (total % 8 != 0) {
    throw InputError(fmt::format("{} is {}: not whole bytes at {} bits", tensor.Name("shape"), ShapeText(shape), bits));
  }
  return total / 8;
}

std::pair<uint64_t, uint64_t> ReadOffsets(const JsonObject& tensor) {
  const Json* offsets = tensor.Find("data_offsets");
  if (offsets == nullptr || !offsets->is_array() || offsets->size() != 2 || !(*offsets)[0].is_number_unsigned() ||
      !(*offsets)[1].is_number_unsigned()) {
    tensor.Fail("data_offsets", "[begin, end]");
  }
  return {(*offsets)[0].get<uint64_t>(), (*offsets)[1].get<uint64_t>()};
}

void CheckMetadata(const JsonObject& header) {
  if (!header.Has("__metadata__")) return;
  const JsonObject metadata = header.Object("__metadata__");
  for (const auto& [key, value] : metadata.Value().items()) {
    if (!value.is_string()) metadata.Fail(key, "text");
  }
}

}  // namespace

std::optional<std::string> SafetensorsMetadata(std::span<const uint8_t> file, const std::string& name,
                                               const std::string& key) {
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes, ReadLength(file));
  const Json json = ParseJson(text, name);
  const JsonObject header(json, name);
  if (!header.Has("__metadata__")) return std::nullopt;
  const JsonObject metadata = header.Object("__metadata__");
  if (!metadata.Has(key)) return std::nullopt;
  return metadata.String(key);
}

std::string ShapeText(std::span<const int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

TensorMap ParseSafetensors(std::span<const uint8_t> file, const std::string& name) {
  if (file.size() < kLengthBytes) {
    throw InputError(fmt::format("{}: truncated: {} bytes, a safetensors file starts with 8", name, file.size()));
  }
  if (std::string_view(reinterpret_cast<const char*>(file.data()), file.size()).starts_with(kGitLfsPointer)) {
    throw InputError(fmt::format("{}: a Git LFS pointer, not the file itself: run git lfs pull in its folder", name));
  }
  const uint64_t header_bytes = ReadLength(file);
  if (header_bytes > kMaxHeaderBytes) {
    throw InputError(fmt::format("{}: not a safetensors file: its header would be {} bytes, at most {} are allowed",
                                 name, header_bytes, kMaxHeaderBytes));
  }
  if (header_bytes > file.size() - kLengthBytes) {
    throw InputError(
        fmt::format("{}: truncated: a header of {} bytes in a file of {}", name, header_bytes, file.size()));
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes, header_bytes);
  if (!text.starts_with('{')) throw InputError(fmt::format("{}: its header does not start with '{{'", name));
  const std::span<const uint8_t> data = file.subspan(kLengthBytes + header_bytes);

  const Json json = ParseJson(text, name);
  const JsonObject header(json, name);
  CheckMetadata(header);
  TensorMap tensors;
  struct Extent {
    uint64_t begin, end;
    const std::string* tensor;
  };
  std::vector<Extent> extents;
  for (const auto& [key, value] : json.items()) {
    if (key == "__metadata__") continue;
    const JsonObject entry(value, name, key);
    const std::string dtype = entry.String("dtype");
    std::vector<int64_t> shape = ReadShape(entry);
    const auto [begin, end] = ReadOffsets(entry);
    if (begin > end || end > data.size()) {
      throw InputError(fmt::format("{} is [{}, {}], outside of the {} bytes of data: the file is truncated or lies",
                                   entry.Name("data_offsets"), begin, end, data.size()));
    }
    const uint64_t bytes = BytesOf(shape, BitsOf(dtype, entry), entry);
    if (bytes != end - begin) {
      throw InputError(fmt::format("{}: tensor {}: {} {} takes {} bytes, its data_offsets hold {}", name, Quote(key),
                                   dtype, ShapeText(shape), bytes, end - begin));
    }
    const auto added = tensors.emplace(key, TensorView{dtype, std::move(shape), data.subspan(begin, end - begin)});
    extents.push_back({begin, end, &added.first->first});
  }

  // Every byte of data belongs to exactly one tensor: no overlap, no gap.
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  uint64_t expected = 0;
  for (const Extent& extent : extents) {
    if (extent.begin != expected) {
      throw InputError(fmt::format("{}: tensor {} starts at byte {}, {} (expected {})", name, Quote(*extent.tensor),
                                   extent.begin, extent.begin < expected ? "inside another tensor" : "after a hole",
                                   expected));
    }
    expected = extent.end;
  }
  if (expected != data.size()) {
    throw InputError(fmt::format("{}: {} bytes of data, but its tensors end at {}", name, data.size(), expected));
  }
  return tensors;
}

}  // namespace kvanta::weights
