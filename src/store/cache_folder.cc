#include "kvanta/cache_folder.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "base/quote.h"
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
        error != 0 ? std::strerror(error) : ReadRecord(bytes, store::IdentityKey(entry.identity), id).fault;
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
