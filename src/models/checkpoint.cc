// Checkpoint: the tensors of a folder, from one safetensors file or from shards.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <set>
#include <utility>

#include "base/memory_map.h"
#include "base/quote.h"
#include "kvanta/error.h"
#include "models/json.h"
#include "models/safetensors.h"

namespace kvanta::models {
namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr size_t kMaxIndexBytes = 100'000'000;

bool IsPlainFileName(std::string_view name) {
  return !name.empty() && name.front() != '.' && name.find_first_of(std::string_view("/\\\0", 3)) == name.npos &&
         name.ends_with(".safetensors");
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

void Checkpoint::AddFile(const std::string& path) {
  mappings_.push_back(std::make_shared<Mapping>(Mapping{MemoryMap(path)}));
  for (auto& [name, view] : ParseSafetensors(mappings_.back()->map.Bytes(), path)) {
    if (!tensors_.emplace(name, std::move(view)).second) {
      throw InputError(fmt::format("{}: tensor {} is in another shard too", path, Quote(name)));
    }
  }
}

Checkpoint Checkpoint::OpenFile(const std::string& folder, const std::string& file) {
  Checkpoint checkpoint;
  checkpoint.folder_ = folder;
  const std::filesystem::path path = std::filesystem::path(folder) / file;
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)) checkpoint.AddFile(path.string());
  return checkpoint;
}

bool Checkpoint::Exists(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  return fs::exists(fs::path(folder) / kSingleFile, ignored) || fs::exists(fs::path(folder) / kIndexFile, ignored);
}

Checkpoint Checkpoint::Open(const std::string& folder) {
  namespace fs = std::filesystem;
  Checkpoint checkpoint;
  checkpoint.folder_ = folder;
  const fs::path root(folder);
  std::error_code ignored;
  if (fs::exists(root / kSingleFile, ignored)) {
    checkpoint.AddFile((root / kSingleFile).string());
    return checkpoint;
  }
  const std::string index = (root / kIndexFile).string();
  if (!fs::exists(index, ignored)) {
    throw InputError(
        fmt::format("{}: no {} and no {}; Kvanta reads safetensors checkpoints only", folder, kSingleFile, kIndexFile));
  }
  const auto shards = ParseShardIndex(ReadTextFile(index, kMaxIndexBytes), index);
  std::set<std::string> files;
  for (const auto& [tensor, file] : shards) files.insert(file);
  std::map<std::string, std::string, std::less<>> found_in;
  for (const std::string& file : files) {
    const size_t first_new = checkpoint.tensors_.size();
    checkpoint.AddFile((root / file).string());
    if (checkpoint.tensors_.size() == first_new)
      throw InputError(fmt::format("{}: shard {} has no tensor", index, Quote(file)));
    for (const auto& [tensor, view] : checkpoint.tensors_) found_in.emplace(tensor, file);
  }
  for (const auto& [tensor, file] : shards) {
    const auto found = found_in.find(tensor);
    if (found == found_in.end() || found->second != file) {
      throw InputError(fmt::format("{}: tensor {} is not in {}, as the index says, but in {}", index, Quote(tensor),
                                   Quote(file), found == found_in.end() ? "no shard" : Quote(found->second)));
    }
  }
  return checkpoint;
}

const TensorView* Checkpoint::Find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

const TensorView& Checkpoint::Get(std::string_view name) const {
  if (const TensorView* view = Find(name)) return *view;
  const std::vector<std::string> names = Names();
  throw InputError(fmt::format("{}: no tensor {}; the nearest names are {}", folder_, Quote(name),
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

}  // namespace kvanta::models
