#include "store/record_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/math.h"
#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta::store {
namespace {

constexpr int64_t kBlockBytes = 4096;  // of file systems: a file takes whole ones
constexpr double kScanSeconds = 30;    // between scans, while this process writes
// A folder that is full is emptied by this share, which bounds what others write between this process's scans.
constexpr int64_t kSlack = 16;
constexpr int64_t kSecondNs = 1'000'000'000;
constexpr int64_t kTemporaryNs = 600 * kSecondNs;  // age at which a temporary file has no owner any more
constexpr int64_t kTouchNs = 60 * kSecondNs;       // a use within this time of the last one is not recorded
constexpr int64_t kPageNs = 1000;                  // a page's time of use before that of the page before it
constexpr size_t kIdentityDigits = 32;

int64_t DiskBytes(int64_t bytes) {
  return RoundUp(bytes, kBlockBytes);
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

RecordFolder::RecordFolder(RecordFolderConfig config)
    : config_(std::move(config)),
      identity_(IdentityKey(config_.identity)),
      identity_name_(Hex(identity_).substr(0, kIdentityDigits)) {
  while (config_.folder.size() > 1 && config_.folder.ends_with('/')) config_.folder.pop_back();
  if (const FileError error = MakeFolder(config_.folder)) {
    throw InputError(fmt::format("kv_cache_dir = {}: {}", Quote(config_.folder), std::strerror(error)));
  }
}

std::string RecordFolder::NameOf(const RecordId& id) const {
  const std::string file = FileName(id);
  return fmt::format("{}/{}/{}", identity_name_, file.substr(0, 2), file);
}

bool RecordFolder::Knows(const RecordId& id) const {
  const std::lock_guard lock(mutex_);
  return files_.contains(NameOf(id));
}

bool RecordFolder::Exists(const RecordId& id) const {
  return FileExists(config_.folder + "/" + NameOf(id));
}

void RecordFolder::Erase(const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (scanning_) erased_during_scan_.push_back(name);
  const auto found = files_.find(name);
  if (found == files_.end()) return;
  usage_.bytes -= found->second.bytes;
  --usage_.files;
  files_.erase(found);
}

void RecordFolder::Add(const std::string& name, Entry entry) {
  const std::lock_guard lock(mutex_);
  const auto [at, fresh] = files_.try_emplace(name);
  usage_.files += fresh ? 1 : 0;
  usage_.bytes += entry.bytes - at->second.bytes;
  at->second = entry;
}

FileError RecordFolder::WriteOnce(const std::string& name, std::span<const std::span<const uint8_t>> parts,
                                  int64_t modified_ns) {
  const std::string path = config_.folder + "/" + name;
  FileError error = WriteFile(path, parts, modified_ns);
  if (error != ENOENT) return error;
  if ((error = MakeFolder(path.substr(0, path.rfind('/'))))) return error;
  const std::string described = fmt::format("{}/{}/{}", config_.folder, identity_name_, kIdentityFile);
  if (!FileExists(described)) {
    const std::span<const uint8_t> text(reinterpret_cast<const uint8_t*>(config_.identity.data()),
                                        config_.identity.size());
    if ((error = WriteFile(described, {&text, 1}, modified_ns))) return error;
  }
  return WriteFile(path, parts, modified_ns);
}

FileError RecordFolder::Write(const RecordId& id, int64_t index, std::span<const int32_t> tokens,
                              std::span<const uint8_t> payload) {
  const std::vector<uint8_t> header = RecordHeader(identity_, id, tokens, payload);
  const int64_t bytes = DiskBytes(std::ssize(header) + std::ssize(payload));
  if (bytes > config_.limit_bytes) return EFBIG;
  bool scan = false;
  {
    const std::lock_guard lock(mutex_);
    scan = written_since_scan_ >= config_.limit_bytes / kSlack || Now() - scanned_at_ > kScanSeconds;
    written_since_scan_ += bytes;
  }
  if (scan) Scan();  // its error is that of the write to come
  if (Usage().bytes + bytes > config_.limit_bytes) {
    EvictTo(std::max<int64_t>(0, config_.limit_bytes - config_.limit_bytes / kSlack - bytes));
  }
  const std::span<const uint8_t> parts[] = {header, payload};
  const std::string name = NameOf(id);
  const int64_t modified_ns = WallClockNs() - index * kPageNs;
  if (const FileError error = WriteOnce(name, parts, modified_ns)) return error;
  Add(name, {.bytes = bytes, .modified_ns = modified_ns});
  return 0;
}

RecordFolder::Outcome RecordFolder::Read(const RecordId& id, std::span<const int32_t> tokens,
                                         std::span<uint8_t> payload, std::string& fault) {
  const std::string name = NameOf(id);
  const std::string path = config_.folder + "/" + name;
  std::vector<uint8_t> file;
  const FileError error = ReadFile(path, config_.max_file_bytes, file);
  if (error == ENOENT || error == ENOTDIR) {
    Erase(name);
    return Outcome::kMissing;
  }
  if (error != 0 && error != EFBIG && error != EINVAL) {
    fault = std::strerror(error);
    return Outcome::kFailed;
  }
  RecordView record;
  if (error == 0) record = ReadRecord(file, identity_, id);
  if (error != 0) {
    record.fault = "it is no regular file of a record's size";
  } else if (record.fault.empty() && record.payload.size() != payload.size()) {
    record.fault = fmt::format("a payload of {} bytes, the record has {}", record.payload.size(), payload.size());
  } else if (record.fault.empty() && !(record.tokens.size() == tokens.size_bytes() &&
                                       std::memcmp(record.tokens.data(), tokens.data(), tokens.size_bytes()) == 0)) {
    record.fault = "it has other token ids";
  }
  if (!record.fault.empty()) {
    fault = fmt::format("{}: {}", Sanitize(name), record.fault);
    Remove(id);
    return Outcome::kDamaged;
  }
  std::ranges::copy(record.payload, payload.begin());
  return Outcome::kRead;
}

bool RecordFolder::IsStale(const RecordId& id) const {
  const int64_t now = WallClockNs();
  const std::lock_guard lock(mutex_);
  const auto found = files_.find(NameOf(id));
  return found != files_.end() && std::abs(now - found->second.modified_ns) >= kTouchNs;
}

void RecordFolder::Touch(const RecordId& id, int64_t index) {
  if (!IsStale(id)) return;
  const std::string name = NameOf(id);
  const int64_t now = WallClockNs() - index * kPageNs;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = files_.find(name); found != files_.end()) found->second.modified_ns = now;
  }
  if (SetModified(config_.folder + "/" + name, now) == ENOENT) Erase(name);
}

void RecordFolder::Remove(const RecordId& id) {
  const std::string name = NameOf(id);
  RemoveFile(config_.folder + "/" + name);
  Erase(name);
}

void RecordFolder::EvictTo(int64_t bytes) {
  std::vector<std::pair<int64_t, std::string>> oldest;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, entry] : files_) {
      if (Classify(name) != StoreFile::kIdentity) oldest.emplace_back(entry.modified_ns, name);
    }
  }
  std::ranges::sort(oldest);
  for (const auto& [modified, name] : oldest) {
    if (Usage().bytes <= bytes) return;
    const FileError error = RemoveFile(config_.folder + "/" + name);
    if (error != 0 && error != ENOENT) continue;
    Erase(name);
    const std::lock_guard lock(mutex_);
    ++usage_.evictions;
  }
}

FileError RecordFolder::Scan() {
  {
    const std::lock_guard lock(mutex_);
    scanning_ = true;
    erased_during_scan_.clear();
  }
  std::vector<FileEntry> found;
  const FileError error = ListFiles(config_.folder, kFolderDepth, found);
  const int64_t now = WallClockNs();
  std::unordered_map<std::string, Entry> files;
  int64_t bytes = 0;
  for (const FileEntry& file : found) {
    const StoreFile kind = Classify(file.path);
    if (kind == StoreFile::kForeign) continue;
    if (kind == StoreFile::kTemporary && now - file.modified_ns > kTemporaryNs) {
      RemoveFile(config_.folder + "/" + file.path);
      continue;
    }
    files.emplace(file.path, Entry{.bytes = DiskBytes(file.bytes), .modified_ns = file.modified_ns});
    bytes += DiskBytes(file.bytes);
  }
  {
    const std::lock_guard lock(mutex_);
    // Files that a reader removed after they were listed: they would count as written and never be written again.
    for (const std::string& name : erased_during_scan_) {
      const auto gone = files.find(name);
      if (gone == files.end()) continue;
      bytes -= gone->second.bytes;
      files.erase(gone);
    }
    scanning_ = false;
    files_ = std::move(files);
    usage_.files = std::ssize(files_);
    usage_.bytes = bytes;
    written_since_scan_ = 0;
    scanned_at_ = Now();
  }
  if (bytes > config_.limit_bytes) EvictTo(config_.limit_bytes - config_.limit_bytes / kSlack);
  return error;
}

FolderUsage RecordFolder::Usage() const {
  const std::lock_guard lock(mutex_);
  return usage_;
}

}  // namespace kvanta::store
