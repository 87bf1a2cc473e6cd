// Records of closed pages in a folder that outlives the process and that several processes may share:
//
//   DIR/<identity>/identity.json     what the records depend on, for people and `kvanta cache ls`
//   DIR/<identity>/<kk>/<key>-0q     a record (record_file.h); kk: first two digits of the key
//
// A file is visible only when it is whole. Total bytes are bounded: the least recently used files of all identities go
// first, by their time of modification, which a use renews. Thread-safe.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "store/file_system.h"
#include "store/record_file.h"

namespace kvanta::store {

inline constexpr int kFolderDepth = 2;  // of records
inline constexpr std::string_view kIdentityFile = "identity.json";

// Kind of a file by its path relative to the folder. Foreign files are never counted, changed or removed.
enum class StoreFile : uint8_t { kForeign, kIdentity, kRecord, kTemporary };
StoreFile Classify(const std::string& path);

struct RecordFolderConfig {
  std::string folder;
  int64_t limit_bytes = 0;
  std::string identity;     // JSON of all that the bytes of a page depend on besides its token ids
  size_t max_file_bytes{};  // longer files are not read
};

struct FolderUsage {
  int64_t files = 0, bytes = 0, evictions = 0;
  int64_t own_bytes = 0;  // of this identity
};

class RecordFolder {
 public:
  // Creates the folder; throws InputError if that fails.
  explicit RecordFolder(RecordFolderConfig config);

  const PageKey& Identity() const noexcept { return identity_; }
  const std::string& Path() const noexcept { return config_.folder; }

  // True if this process has seen or written the file and not seen it go.
  bool Knows(const RecordId& id) const;
  bool Exists(const RecordId& id) const;
  // True if this process knows the file, and its time of last use is not of the last moments.
  bool IsStale(const RecordId& id) const;

  // Writes a record of page `index`, evicting others as needed. Creates folders that have gone.
  FileError Write(const RecordId& id, int64_t index, std::span<const int32_t> tokens, std::span<const uint8_t> payload);

  enum class Outcome : uint8_t { kRead, kMissing, kDamaged, kFailed };
  // Reads a record whose page has these token ids; `payload` must have the record's size. A damaged file is removed.
  Outcome Read(const RecordId& id, std::span<const int32_t> tokens, std::span<uint8_t> payload, std::string& fault);

  // Renews the time of last use if it is stale. Within a prefix, earlier pages count as used later, so
  // that they are evicted after those that depend on them.
  void Touch(const RecordId& id, int64_t index);
  // Gives the file a time of use in the future, at most a day from now: until then, others are evicted before it. Such
  // files may take half of the limit; beyond it, those that are kept for the shortest time are the first to go.
  void Pin(const RecordId& id, int64_t index, int64_t until_ns);
  void Remove(const RecordId& id);

  // Counts the files, those of other processes included, removes what died processes left, and evicts.
  FileError Scan();
  FolderUsage Usage() const;

 private:
  struct Entry {
    int64_t bytes = 0, modified_ns = 0;
  };

  std::string NameOf(const RecordId& id) const;  // relative to the folder
  void SetUse(const std::string& name, int64_t modified_ns);
  void Erase(const std::string& name);
  void Add(const std::string& name, Entry entry);
  std::vector<std::string> EvictionOrder() const;
  void EvictTo(int64_t bytes);
  // With the mutex.
  void Count(const std::string& name, int64_t bytes);
  void AgeFuture(std::vector<FileEntry>& files, int64_t now) const;
  FileError WriteOnce(const std::string& name, std::span<const std::span<const uint8_t>> parts, int64_t modified_ns);

  RecordFolderConfig config_;
  PageKey identity_;
  std::string identity_name_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, Entry> files_;  // by name
  bool scanning_ = false;
  std::vector<std::string> erased_during_scan_;
  FolderUsage usage_;
  int64_t written_since_scan_ = 0;
  double scanned_at_ = 0, scan_pause_ = 0;
};

}  // namespace kvanta::store
