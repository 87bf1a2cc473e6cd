#include "store/record_folder.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/math.h"
#include "base/quote.h"
#include "cache/record_listener.h"
#include "kvanta/error.h"

namespace kvanta::store {
namespace {

constexpr int64_t kBlockBytes = 4096;  // block of a file system: a file takes whole ones
constexpr double kScanSeconds = 30;    // between scans, while this process writes, at least
constexpr double kScanShare = 100;     // times the time of a scan, which may be long, at least
// A folder that is full is emptied by this share, which bounds what others write between this process's scans.
constexpr int64_t kSlack = 16;
constexpr int64_t kSecondNs = 1'000'000'000;
constexpr int64_t kTemporaryNs = 600 * kSecondNs;  // age at which a temporary file has no owner any more
constexpr int64_t kTouchNs = 60 * kSecondNs;       // a use within this time of the last one is not recorded
constexpr int64_t kMaxPinNs = 86400 * kSecondNs;   // in the future; a later time is of a clock that has been set back
// A page's time of use is so much before that of the page before it, without which it is of no use: more than the time
// between the uses of two pages of one hit.
constexpr int64_t kPageNs = 1'000'000;

int64_t DiskBytes(int64_t bytes) {
  return RoundUp(bytes, kBlockBytes);
}

std::string NameOfFolder(const std::string& folder) {
  return fmt::format("kv_cache_dir = {}", Quote(folder));
}

bool IsHex(std::string_view text, size_t digits) {
  return text.size() == digits && text.find_first_not_of("0123456789abcdef") == text.npos;
}

}  // namespace

StoreFile Classify(const std::string& path) {
  const std::string_view text(path);
  const size_t folder = text.find('/');
  if (folder == text.npos || !IsHex(text.substr(0, folder), kIdentityDigits)) return StoreFile::kForeign;
  const std::string_view rest = text.substr(folder + 1);
  if (rest == kIdentityFile) return StoreFile::kIdentity;
  if (IsTemporary(path)) return StoreFile::kTemporary;
  RecordId id;
  const bool is_record =
      rest.size() > 3 && rest[2] == '/' && ParseFileName(rest.substr(3), id) && rest.substr(0, 2) == rest.substr(3, 2);
  return is_record ? StoreFile::kRecord : StoreFile::kForeign;
}

void MakeCacheFolder(const std::string& folder) {
  if (const FileError error = MakeFolder(folder)) {
    throw InputError(fmt::format("{}: {}", NameOfFolder(folder), std::strerror(error)));
  }
}

std::string WarnOfOtherWriters(const std::string& folder) {
  struct stat status = {};
  if (::stat(folder.c_str(), &status) != 0) return {};
  std::string who;
  if (status.st_uid != ::geteuid() && status.st_uid != 0) {
    who = fmt::format("belongs to user {}, not to {}", status.st_uid, ::geteuid());
  } else if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    who = fmt::format("can be written by other users (mode {:04o})", status.st_mode & 07777U);
  } else {
    return {};
  }
  return fmt::format("{}: {}, who may place pages of their own making there: give a folder of mode 0700",
                     NameOfFolder(folder), who);
}

RecordFolder::RecordFolder(RecordFolderConfig config)
    : config_(std::move(config)), identity_name_(IdentityName(IdentityKey(config_.identity))) {
  while (config_.folder.size() > 1 && config_.folder.ends_with('/')) config_.folder.pop_back();
  MakeCacheFolder(config_.folder);
  if (FileExists(PathOf(identity_name_))) WriteIdentity(WallClockNs());  // an error is that of the writes to come
}

std::string RecordFolder::Name() const {
  return NameOfFolder(config_.folder);
}

std::string RecordFolder::NameOf(const RecordId& id) const {
  const std::string file = FileName(id);
  return fmt::format("{}/{}/{}", identity_name_, file.substr(0, 2), file);
}

bool RecordFolder::IsKnown(const RecordId& id) const {
  const std::lock_guard lock(mutex_);
  return files_.contains(NameOf(id));
}

void RecordFolder::Describe(CacheTierStats& stats) const {
  const std::lock_guard lock(mutex_);
  stats.enabled = true;
  stats.files = std::ssize(files_);
  stats.bytes = used_bytes_;
  stats.own_bytes = own_bytes_;
  stats.limit_bytes = config_.limit_bytes;
  stats.evictions = evictions_;
}

int64_t RecordFolder::UsedBytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

std::string RecordFolder::Find(std::span<const RecordId> ids, std::span<uint8_t> found) {
  FileError fault = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const FileError error = CheckFile(PathOf(NameOf(ids[i])));
    found[i] = error == 0 ? 1 : 0;
    if (error != 0 && error != ENOENT && error != ENOTDIR && fault == 0) fault = error;
  }
  return fault == 0 ? std::string() : std::strerror(fault);
}

void RecordFolder::Count(const std::string& name, int64_t bytes) {
  used_bytes_ += bytes;
  if (name.starts_with(identity_name_)) own_bytes_ += bytes;
}

void RecordFolder::Erase(const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (scanning_) erased_during_scan_.push_back(name);
  const auto found = files_.find(name);
  if (found == files_.end()) return;
  Count(name, -found->second.bytes);
  files_.erase(found);
}

void RecordFolder::Add(const std::string& name, Entry entry) {
  const std::lock_guard lock(mutex_);
  Entry& known = files_[name];
  Count(name, entry.bytes - known.bytes);
  known = entry;
}

void RecordFolder::Know(const std::string& name) {
  {
    const std::lock_guard lock(mutex_);
    if (files_.contains(name)) return;
  }
  const std::optional<FileEntry> file = FindFile(PathOf(name));
  if (file) Add(name, {.bytes = DiskBytes(file->bytes), .modified_ns = file->modified_ns});
}

FileError RecordFolder::WriteOnce(const std::string& name, std::span<const std::span<const uint8_t>> parts,
                                  int64_t modified_ns) {
  const std::string path = PathOf(name);
  FileError error = WriteFile(path, parts, modified_ns);
  if (error != ENOENT) return error;
  if ((error = MakeFolder(path.substr(0, path.rfind('/'))))) return error;
  if ((error = WriteIdentity(modified_ns))) return error;
  return WriteFile(path, parts, modified_ns);
}

FileError RecordFolder::WriteIdentity(int64_t modified_ns) {
  const std::string path = PathOf(fmt::format("{}/{}", identity_name_, kIdentityFile));
  const std::span<const uint8_t> text(reinterpret_cast<const uint8_t*>(config_.identity.data()),
                                      config_.identity.size());
  std::vector<uint8_t> found;
  if (ReadFile(path, text.size(), found) == 0 && std::ranges::equal(found, text)) return 0;
  return WriteFile(path, {&text, 1}, modified_ns);
}

WriteResult RecordFolder::Write(std::span<const RecordToWrite> records) {
  WriteResult result;
  for (const RecordToWrite& record : records) {
    const std::string name = NameOf(record.use.id);
    if (FileExists(PathOf(name))) {  // another process may have written it
      Know(name);
      continue;
    }
    result.error = WriteFileOf(record);
    if (!result.error.empty()) break;
    result.bytes += std::ssize(record.content->Payload());
  }
  return result;
}

// Pages of a prefix are written as they are computed, which may take any time between them.
int64_t RecordFolder::TimeOfWrite(const RecordToWrite& record) const {
  const int64_t now = WallClockNs() - record.use.index * kPageNs;
  if (record.use.index == 0) return now;
  RecordId before = record.use.id;
  before.key = record.content->parent;
  const std::lock_guard lock(mutex_);
  const auto found = files_.find(NameOf(before));
  return found == files_.end() ? now : std::min(now, found->second.modified_ns - kPageNs);
}

std::string RecordFolder::WriteFileOf(const RecordToWrite& record) {
  const int64_t bytes = DiskBytes(std::ssize(record.header) + std::ssize(record.content->Payload()));
  if (bytes > config_.limit_bytes) return std::strerror(EFBIG);
  bool scan = false;
  {
    const std::lock_guard lock(mutex_);
    scan = written_since_scan_ >= config_.limit_bytes / kSlack || config_.now() - scanned_at_ > scan_pause_;
    written_since_scan_ += bytes;
  }
  if (scan) Scan();  // its error is that of the write to come
  if (UsedBytes() + bytes > config_.limit_bytes) {
    EvictTo(std::max<int64_t>(0, config_.limit_bytes - config_.limit_bytes / kSlack - bytes));
    if (const int64_t left = UsedBytes(); left + bytes > config_.limit_bytes) {
      return fmt::format("{} bytes do not fit in addition to {} that cannot be removed, with a limit of {}", bytes,
                         left, config_.limit_bytes);
    }
  }
  const std::span<const uint8_t> parts[] = {record.header, record.content->Payload()};
  const std::string name = NameOf(record.use.id);
  const int64_t modified_ns = TimeOfWrite(record);
  if (const FileError error = WriteOnce(name, parts, modified_ns)) return std::strerror(error);
  Add(name, {.bytes = bytes, .modified_ns = modified_ns});
  return {};
}

std::vector<ReadResult> RecordFolder::Read(std::span<const RecordId> ids) {
  std::vector<ReadResult> results;
  for (const RecordId& id : ids) results.push_back(ReadFileOf(id));
  return results;
}

ReadResult RecordFolder::ReadFileOf(const RecordId& id) {
  using enum ReadResult::Outcome;
  const std::string name = NameOf(id);
  ReadResult result;
  const FileError error = ReadFile(PathOf(name), config_.max_file_bytes, result.bytes);
  if (error == 0) {
    result.outcome = kRead;
    Know(name);
  } else if (error == ENOENT || error == ENOTDIR) {
    Erase(name);
  } else if (error == EFBIG || error == EINVAL) {
    result.outcome = kDamaged;
    result.fault = "it is no regular file of a record's size";
  } else {
    result.outcome = kFailed;
    result.fault = std::strerror(error);
  }
  return result;
}

bool RecordFolder::NeedsTouch(const RecordId& id) const {
  const int64_t now = WallClockNs();
  const std::lock_guard lock(mutex_);
  const auto found = files_.find(NameOf(id));
  return found != files_.end() && now - found->second.modified_ns >= kTouchNs;
}

void RecordFolder::SetUse(const std::string& name, int64_t modified_ns) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = files_.find(name); found != files_.end()) found->second.modified_ns = modified_ns;
  }
  if (SetModified(PathOf(name), modified_ns) == ENOENT) Erase(name);
}

void RecordFolder::Touch(std::span<const RecordUse> records) {
  for (const RecordUse& use : records) {
    if (NeedsTouch(use.id)) SetUse(NameOf(use.id), WallClockNs() - use.index * kPageNs);
  }
}

void RecordFolder::Pin(std::span<const RecordUse> records, std::span<const int64_t> until_ns) {
  for (size_t i = 0; i < records.size(); ++i) {
    const std::string name = NameOf(records[i].id);
    const int64_t modified_ns = std::min(until_ns[i], WallClockNs() + kMaxPinNs) - records[i].index * kPageNs;
    {
      const std::lock_guard lock(mutex_);
      const auto found = files_.find(name);
      if (found != files_.end() && found->second.modified_ns >= modified_ns - kSecondNs) continue;
    }
    SetUse(name, modified_ns);
  }
}

void RecordFolder::Remove(std::span<const RecordId> ids) {
  for (const RecordId& id : ids) {
    const std::string name = NameOf(id);
    RemoveFile(PathOf(name));
    Erase(name);
  }
}

// Files by their time of last use, the first to go at the beginning: those that are pinned beyond their share, then the
// others.
std::vector<std::string> RecordFolder::EvictionOrder() const {
  struct Use {
    int64_t modified_ns;
    std::string name;
    int64_t bytes;
  };
  std::vector<Use> uses;
  {
    const std::lock_guard lock(mutex_);
    uses.reserve(files_.size());
    for (const auto& [name, entry] : files_) {
      if (Classify(name) != StoreFile::kIdentity) uses.push_back({entry.modified_ns, name, entry.bytes});
    }
  }
  std::ranges::sort(uses, {}, &Use::modified_ns);
  const auto pinned = std::ranges::upper_bound(uses, WallClockNs(), {}, &Use::modified_ns);
  int64_t excess = -cache::MaxPinnedBytes(config_.limit_bytes);
  for (auto at = pinned; at != uses.end(); ++at) excess += at->bytes;
  auto kept = pinned;
  for (; kept != uses.end() && excess > 0; ++kept) excess -= kept->bytes;
  std::rotate(uses.begin(), pinned, kept);
  std::vector<std::string> names;
  names.reserve(uses.size());
  for (Use& use : uses) names.push_back(std::move(use.name));
  return names;
}

void RecordFolder::EvictTo(int64_t bytes) {
  for (const std::string& name : EvictionOrder()) {
    if (UsedBytes() <= bytes) return;
    const FileError error = RemoveFile(PathOf(name));
    if (error != 0 && error != ENOENT) continue;
    Erase(name);
    const std::lock_guard lock(mutex_);
    ++evictions_;
  }
}

// Files that were used further in the future than any is pinned, by a clock that has been set back since, would stay
// too long: they count as used now, in their order.
void RecordFolder::AgeFuture(std::vector<FileEntry>& files, int64_t now) const {
  std::vector<FileEntry*> future;
  for (FileEntry& file : files) {
    if (file.modified_ns > now + kMaxPinNs + kTouchNs && Classify(file.path) == StoreFile::kRecord)
      future.push_back(&file);
  }
  std::ranges::sort(future, {}, [](const FileEntry* file) { return file->modified_ns; });
  for (size_t i = 0; i < future.size(); ++i) {
    future[i]->modified_ns = now - static_cast<int64_t>(future.size() - i) * kPageNs;
    SetModified(PathOf(future[i]->path), future[i]->modified_ns);
  }
}

FileError RecordFolder::Scan() {
  const double start = config_.now();
  {
    const std::lock_guard lock(mutex_);
    scanning_ = true;
    erased_during_scan_.clear();
  }
  std::vector<FileEntry> found;
  const FileError error = ListFiles(config_.folder, kFolderDepth, found);
  const int64_t now = WallClockNs();
  AgeFuture(found, now);
  std::unordered_map<std::string, Entry> files;
  for (const FileEntry& file : found) {
    const StoreFile kind = Classify(file.path);
    if (kind == StoreFile::kForeign) continue;
    if (kind == StoreFile::kTemporary && std::abs(now - file.modified_ns) > kTemporaryNs) {
      RemoveFile(PathOf(file.path));
      continue;
    }
    files.emplace(file.path, Entry{.bytes = DiskBytes(file.bytes), .modified_ns = file.modified_ns});
  }
  // Somebody may have removed the description alone.
  const auto is_own_record = [&](const auto& file) {
    return file.first.starts_with(identity_name_) && Classify(file.first) == StoreFile::kRecord;
  };
  if (!files.contains(fmt::format("{}/{}", identity_name_, kIdentityFile)) &&
      std::ranges::any_of(files, is_own_record)) {
    WriteIdentity(now);  // an error is that of the write to come
  }
  bool full = false;
  {
    const std::lock_guard lock(mutex_);
    // Files that a reader removed after they were listed: they would count as written and never be written again.
    for (const std::string& name : erased_during_scan_) files.erase(name);
    scanning_ = false;
    files_ = std::move(files);
    used_bytes_ = own_bytes_ = 0;
    for (const auto& [name, entry] : files_) Count(name, entry.bytes);
    full = used_bytes_ > config_.limit_bytes;
    written_since_scan_ = 0;
    scanned_at_ = config_.now();
    scan_pause_ = std::max(kScanSeconds, kScanShare * (scanned_at_ - start));
  }
  if (full) EvictTo(config_.limit_bytes - config_.limit_bytes / kSlack);
  return error;
}

}  // namespace kvanta::store
