// Checkpoint: the tensors of a folder, from one safetensors file, from shards, or from GGUF files.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <set>
#include <utility>

#include "base/device.h"
#include "base/json.h"
#include "base/memory_map.h"
#include "base/quote.h"
#include "kvanta/error.h"
#include "weights/gguf_index.h"
#include "weights/safetensors.h"

namespace kvanta::weights {
namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr size_t kMaxIndexBytes = 100'000'000;

bool IsPlainFileName(std::string_view name) {
  return !name.empty() && name.front() != '.' && name.find_first_of(std::string_view("/\\\0", 3)) == name.npos &&
         name.ends_with(".safetensors");
}

bool HasGgufMagic(std::span<const uint8_t> file) {
  constexpr std::string_view kMagic = "GGUF";
  return file.size() >= kMagic.size() && std::equal(kMagic.begin(), kMagic.end(), file.begin());
}

// The folder's *.safetensors files without an index, whatever their names: not those of adapters, nor of the copy of
// the weights that Mistral's own code reads.
std::vector<std::string> FindFiles(const std::string& folder) {
  namespace fs = std::filesystem;
  std::vector<std::string> files;
  std::error_code error;
  for (fs::directory_iterator next(folder, error), end; !error && next != end; next.increment(error)) {
    const std::string name = next->path().filename().string();
    if (IsPlainFileName(name) && !name.starts_with("adapter_") && !name.starts_with("consolidated")) {
      files.push_back(name);
    }
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace

struct Checkpoint::Mapping {
  MemoryMap map;
};

std::map<std::string, std::string, std::less<>> ParseShardIndex(std::string_view text, const std::string& name) {
  const Json json = ParseJson(text, name);
  const JsonObject weight_map = JsonObject(json, name).Object("weight_map");
  std::map<std::string, std::string, std::less<>> shards;
  for (const auto& [tensor, file] : weight_map.Value().items()) {
    if (!file.is_string() || !IsPlainFileName(file.get_ref<const std::string&>())) {
      weight_map.Fail(tensor, "the name of a .safetensors file in the same folder");
    }
    shards.emplace(tensor, file.get<std::string>());
  }
  if (shards.empty()) throw InputError(fmt::format("{}: its weight_map is empty", name));
  return shards;
}

void Checkpoint::AddFile(const std::string& path, const std::function<bool(const std::string&)>& replaces) {
  mappings_.push_back(std::make_shared<Mapping>(Mapping{MemoryMap(path)}));
  for (auto& [name, view] : ParseSafetensors(mappings_.back()->map.Bytes(), path)) {
    const auto [place, is_new] = tensors_.try_emplace(name, view);
    if (is_new) continue;
    if (!replaces) throw InputError(fmt::format("{}: tensor {} is in another shard too", path, Quote(name)));
    if (replaces(name)) place->second = view;
  }
}

// Maps the GGUF files of an index. A file that is not the one that was indexed is refused: offsets would lead anywhere.
// So is one that is no GGUF file: an index that came with a model may name any file of this machine.
void Checkpoint::AddGgufIndex(const std::string& folder, const std::string& index) {
  const GgufIndex gguf = ParseGgufIndex(ReadTextFile(index, kMaxIndexBytes), index);
  is_gguf_ = true;
  name_ = gguf.files.front().path;
  for (const GgufFile& file : gguf.files) {
    mappings_.push_back(std::make_shared<Mapping>(Mapping{MemoryMap(file.path)}));
    const MemoryMap& map = mappings_.back()->map;
    if (!HasGgufMagic(map.Bytes()))
      throw InputError(fmt::format("{}: no GGUF file, as {} says", Sanitize(file.path, 400), index));
    if (map.Bytes().size() != file.size || map.ModifiedNs() != file.mtime_ns) {
      throw InputError(fmt::format(
          "{}: changed since {} was written ({} bytes then, {} bytes now); give the GGUF file as the model, not this "
          "folder, or remove the folder",
          Sanitize(file.path, 400), index, file.size, map.Bytes().size()));
    }
  }
  for (const auto& [name, tensor] : gguf.tensors) {
    const std::span<const uint8_t> file = mappings_[tensor.file]->map.Bytes();
    tensors_.emplace(name, TensorView{.dtype = tensor.type,
                                      .shape = tensor.shape,
                                      .data = file.subspan(tensor.offset, tensor.bytes),
                                      .interleaved_heads = tensor.interleaved_heads});
  }
  if (gguf.converted.empty()) return;
  if (!IsPlainFileName(gguf.converted)) {
    throw InputError(
        fmt::format("{}: key 'converted' is {}; expected the name of a .safetensors file in the same folder", index,
                    Quote(gguf.converted)));
  }
  AddFile((std::filesystem::path(folder) / gguf.converted).string());
}

Checkpoint Checkpoint::OfTensors(TensorMap tensors, std::string name) {
  Checkpoint checkpoint;
  checkpoint.name_ = std::move(name);
  checkpoint.tensors_ = std::move(tensors);
  return checkpoint;
}

Checkpoint Checkpoint::SplitExperts(std::string_view module, int64_t count) const {
  Checkpoint split = *this;
  const std::string infix = fmt::format(".{}.", module);
  for (const auto& [name, tensor] : tensors_) {
    const size_t at = name.rfind(infix);
    const bool is_stack = at != name.npos && tensor.shape.size() == 3 && tensor.shape.front() == count;
    if (!is_stack || tensor.data.size() % static_cast<size_t>(count) != 0) continue;
    const size_t bytes = tensor.data.size() / static_cast<size_t>(count);
    const std::string_view layer = std::string_view(name).substr(0, at),
                           part = std::string_view(name).substr(at + infix.size());
    for (int64_t i = 0; i < count; ++i) {
      TensorView view = tensor;
      view.shape.erase(view.shape.begin());
      view.data = tensor.data.subspan(static_cast<size_t>(i) * bytes, bytes);
      split.tensors_.emplace(fmt::format("{}{}experts.{}.{}", layer, infix, i, part), std::move(view));
    }
    split.tensors_.erase(name);
  }
  return split;
}

bool Checkpoint::IsGgufFolder(const std::string& folder) {
  std::error_code ignored;
  return std::filesystem::exists(std::filesystem::path(folder) / kGgufIndexFile, ignored);
}

bool Checkpoint::Exists(const std::string& folder) {
  std::error_code ignored;
  const bool has_known = std::ranges::any_of(
      std::array{kGgufIndexFile, kSingleFile, kIndexFile},
      [&](const char* file) { return std::filesystem::exists(std::filesystem::path(folder) / file, ignored); });
  return has_known || !FindFiles(folder).empty();
}

Checkpoint Checkpoint::Open(const std::string& folder) {
  Checkpoint checkpoint;
  checkpoint.name_ = folder;
  const auto path = [&](const char* file) { return (std::filesystem::path(folder) / file).string(); };
  std::error_code ignored;
  if (IsGgufFolder(folder)) {
    checkpoint.AddGgufIndex(folder, path(kGgufIndexFile));
  } else if (std::filesystem::exists(path(kSingleFile), ignored)) {
    checkpoint.AddFile(path(kSingleFile));
  } else if (std::filesystem::exists(path(kIndexFile), ignored)) {
    checkpoint.AddShards(folder, path(kIndexFile));
  } else {
    const std::vector<std::string> files = FindFiles(folder);
    for (const std::string& file : files) checkpoint.AddFile(path(file.c_str()));
    if (files.empty()) {
      throw InputError(fmt::format("{}: no {} and no {}; Kvanta reads safetensors checkpoints only", folder,
                                   kSingleFile, kIndexFile));
    }
  }
  checkpoint.exceeds_memory_ = 2 * checkpoint.TotalBytes() > Cpu().AvailableBytes();
  return checkpoint;
}

// Tensors are looked for in all shards, as in transformers: an index may name some that were taken out or moved. Where
// two shards have one, the index tells which counts.
void Checkpoint::AddShards(const std::string& folder, const std::string& index) {
  const auto shards = ParseShardIndex(ReadTextFile(index, kMaxIndexBytes), index);
  std::set<std::string> files;
  for (const auto& [tensor, file] : shards) files.insert(file);
  for (const std::string& file : files) {
    AddFile((std::filesystem::path(folder) / file).string(), [&](const std::string& tensor) {
      const auto found = shards.find(tensor);
      if (found != shards.end()) return found->second == file;
      throw InputError(fmt::format("{}: tensor {} is in several shards, and not in the index", index, Quote(tensor)));
    });
  }
}

void Checkpoint::Release(const TensorView& tensor) const noexcept {
  for (const auto& mapping : mappings_) mapping->map.ReleasePages(tensor.data);
}

void Checkpoint::Evict(const TensorView& tensor) const noexcept {
  if (!exceeds_memory_) return Release(tensor);
  for (const auto& mapping : mappings_) mapping->map.EvictPages(tensor.data);
}

const TensorView* Checkpoint::Find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

const TensorView& Checkpoint::Get(std::string_view name) const {
  if (const TensorView* view = Find(name)) return *view;
  const std::vector<std::string> names = Names();
  throw InputError(fmt::format("{}: no tensor {}; the nearest names are {}", name_, Quote(name),
                               fmt::join(Nearest(name, names), ", ")));
}

std::vector<std::string> Checkpoint::Names() const {
  std::vector<std::string> names;
  names.reserve(tensors_.size());
  for (const auto& [name, view] : tensors_) names.push_back(name);
  return names;
}

int64_t Checkpoint::TotalBytes() const {
  int64_t bytes = 0;
  for (const auto& [name, view] : tensors_) bytes += static_cast<int64_t>(view.data.size());
  return bytes;
}

}  // namespace kvanta::weights
