#include "kvanta/cache_folder.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/quote.h"
#include "formats/page_header.h"
#include "kvanta/error.h"
#include "store/record_folder.h"

namespace kvanta {
namespace {

using store::Classify;
using store::FileEntry;
using store::StoreFile;

constexpr size_t kMaxFileBytes = size_t{1} << 30;
constexpr size_t kMaxIdentityBytes = size_t{1} << 20;

std::vector<FileEntry> FilesOf(const std::string& folder) {
  std::vector<FileEntry> files;
  if (const store::FileError error = store::ListFiles(folder, store::kFolderDepth, files)) {
    throw InputError(fmt::format("cache folder {}: {}", Quote(folder), std::strerror(error)));
  }
  std::erase_if(files, [](const FileEntry& file) { return Classify(file.path) == StoreFile::kForeign; });
  return files;
}

// Empty for what is no identity.
std::string IdentityOf(const std::string& path) {
  std::vector<uint8_t> bytes;
  if (store::ReadFile(path, kMaxIdentityBytes, bytes) != 0) return {};
  return {bytes.begin(), bytes.end()};
}

// Layout of the pages of an identity; null if it is of a version that encodes them in another way.
std::optional<formats::CacheLayout> LayoutOf(const std::string& identity) {
  using Json = nlohmann::ordered_json;
  const Json json = Json::parse(identity, nullptr, false);
  if (!json.is_object() || !json.contains("pages")) return std::nullopt;
  try {
    return formats::PageHeaderFromJson(json["pages"].dump(-1, ' ', false, Json::error_handler_t::replace)).layout;
  } catch (const InputError&) {
    return std::nullopt;
  }
}

std::string PayloadFault(const store::PageFile& page, const std::optional<formats::CacheLayout>& layout) {
  if (!page.fault.empty() || !layout) return page.fault;
  if (page.id.group >= std::ssize(layout->groups)) {
    return fmt::format("KV cache group {}, its identity has {}", page.id.group, layout->groups.size());
  }
  const formats::GroupBytes& group = layout->groups[static_cast<size_t>(page.id.group)];
  const int64_t bytes = BytesOf(group, page.id.kind);
  if (std::ssize(page.payload) == bytes) return {};
  return fmt::format("a payload of {} bytes, its identity describes {}", page.payload.size(), bytes);
}

// Text of a page file's identity: its own, or that of the folder that it is in.
std::string IdentityOf(const store::PageFile& page, const std::string& path) {
  if (page.version != 1) return std::string(page.identity_text);
  const size_t name = path.rfind('/');
  const std::string folder = name == path.npos ? ".." : path.substr(0, name) + "/..";
  std::string identity = IdentityOf(fmt::format("{}/{}", folder, store::kIdentityFile));
  return store::IdentityKey(identity) == page.identity ? identity : std::string();
}

std::vector<CacheFolderEntry> Examine(const std::string& folder, bool verify) {
  std::map<std::string, CacheFolderEntry> entries;
  std::map<std::string, std::set<store::PageKey>> pages;
  std::vector<FileEntry> files = FilesOf(folder);
  std::ranges::sort(files, {}, &FileEntry::path);
  for (const FileEntry& file : files) {
    const std::string name = file.path.substr(0, file.path.find('/'));
    CacheFolderEntry& entry = entries[name];
    entry.name = name;
    if (Classify(file.path) == StoreFile::kIdentity) entry.identity = IdentityOf(folder + "/" + file.path);
  }
  std::map<std::string, std::optional<formats::CacheLayout>> layouts;
  if (verify) {
    for (const auto& [name, entry] : entries) layouts[name] = LayoutOf(entry.identity);
  }
  for (const FileEntry& file : files) {
    store::RecordId id;
    if (!store::ParseFileName(std::string_view(file.path).substr(file.path.rfind('/') + 1), id)) continue;
    CacheFolderEntry& entry = entries[file.path.substr(0, file.path.find('/'))];
    ++entry.files;
    entry.bytes += file.bytes;
    entry.last_used = std::max(entry.last_used, static_cast<double>(file.modified_ns) * 1e-9);
    pages[entry.name].insert(id.key);
    if (!verify) continue;
    std::vector<uint8_t> bytes;
    const store::FileError error = store::ReadFile(folder + "/" + file.path, kMaxFileBytes, bytes);
    const std::string fault =
        error != 0 ? std::strerror(error)
                   : PayloadFault(ReadRecord(bytes, store::IdentityKey(entry.identity), id), layouts[entry.name]);
    if (!fault.empty()) entry.damaged.push_back(fmt::format("{}: {}", file.path, fault));
  }
  std::vector<CacheFolderEntry> list;
  for (auto& [name, entry] : entries) {
    entry.pages = std::ssize(pages[name]);
    list.push_back(std::move(entry));
  }
  return list;
}

}  // namespace

std::vector<CacheFolderEntry> ListCacheFolder(const std::string& folder) {
  return Examine(folder, false);
}

std::vector<CacheFolderEntry> VerifyCacheFolder(const std::string& folder) {
  return Examine(folder, true);
}

PageFileInfo ShowPageFile(const std::string& path) {
  std::vector<uint8_t> bytes;
  if (const store::FileError error = store::ReadFile(path, kMaxFileBytes, bytes)) {
    const char* const why = error == EINVAL ? "not a regular file" : std::strerror(error);
    throw InputError(fmt::format("page file {}: {}", Quote(path), why));
  }
  const store::PageFile page = store::ReadPageFile(bytes);
  PageFileInfo info{.version = static_cast<int>(page.version), .fault = page.fault};
  if (!page.fault.empty()) return info;
  info.identity_key = store::Hex(page.identity);
  info.key = store::Hex(page.id.key);
  info.identity = IdentityOf(page, path);
  info.group = page.id.group;
  info.exact = page.id.kind == cache::PageKind::kExact;
  info.tokens.resize(page.tokens.size() / sizeof(int32_t));
  if (!info.tokens.empty()) std::memcpy(info.tokens.data(), page.tokens.data(), page.tokens.size());
  info.payload_bytes = std::ssize(page.payload);
  info.checksum = fmt::format("{:016x}", page.checksum);
  info.fault = PayloadFault(page, LayoutOf(info.identity));
  store::RecordId named;
  if (store::ParseFileName(std::string_view(path).substr(path.rfind('/') + 1), named) && named != page.id) {
    info.fault = "it is the record of another page";
  }
  return info;
}

int64_t ClearCacheFolder(const std::string& folder) {
  int64_t removed = 0;
  std::set<std::string> folders;
  for (const FileEntry& file : FilesOf(folder)) {
    if (store::RemoveFile(folder + "/" + file.path) == 0) ++removed;
    folders.insert(folder + "/" + file.path.substr(0, file.path.find('/')));
  }
  // Folders of evicted records are empty already; those that are not empty stay.
  for (const std::string& identity : folders) {
    for (int digits = 0; digits < 256; ++digits) ::rmdir(fmt::format("{}/{:02x}", identity, digits).c_str());
    ::rmdir(identity.c_str());
  }
  return removed;
}

}  // namespace kvanta
