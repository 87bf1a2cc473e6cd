// Records of closed pages in a folder that outlives the process and that several processes may share:
//
//   DIR/<identity>/identity.json     what the records depend on, for people and `kvanta cache ls`
//   DIR/<identity>/<kk>/<key>-0q     a record (page_file.h); kk: first two digits of the key
//
// A file is visible only when it is whole. Total bytes are bounded: the least recently used files of all identities go
// first, by their time of modification, which a use renews; that of a page is before that of the page before it.
// Thread-safe.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "store/file_system.h"
#include "store/record_backend.h"

namespace kvanta::store {

inline constexpr int kFolderDepth = 2;  // levels of folders of records
inline constexpr std::string_view kIdentityFile = "identity.json";

// Kind of a file by its path relative to the folder. Foreign files are never counted, changed or removed.
enum class StoreFile : uint8_t { kForeign, kIdentity, kRecord, kTemporary };
StoreFile Classify(const std::string& path);

// Creates the folder of kv_cache_dir; throws InputError if that fails.
void MakeCacheFolder(const std::string& folder);
// A warning if others than this process's user can write to the folder: its files have checksums, but no key. Empty:
// they cannot.
std::string WarnOfOtherWriters(const std::string& folder);

struct RecordFolderConfig {
  std::string folder;
  int64_t limit_bytes = 0;
  std::string identity;     // JSON of all that the bytes of a page depend on besides its token ids
  size_t max_file_bytes{};  // longer files are not read
  Clock now = Now;          // clock of the pauses between counts of the files
};

class RecordFolder final : public RecordBackend {
 public:
  // Creates the folder; throws InputError if that fails.
  explicit RecordFolder(RecordFolderConfig config);

  std::string Name() const override;
  std::string NameOf(const RecordId& id) const override;  // relative to the folder
  int64_t BatchBytes() const noexcept override { return 0; }

  bool IsKnown(const RecordId& id) const override;
  bool NeedsTouch(const RecordId& id) const override;
  void Invalidate(const RecordId& id) override { Erase(NameOf(id)); }
  void Describe(CacheTierStats& stats) const override;

  void Open() override { Scan(); }  // before the first write, which may have to evict
  // Evicts others as needed, and creates folders that have gone.
  WriteResult Write(std::span<const RecordToWrite> records) override;
  void Touch(std::span<const RecordUse> records) override;
  // Gives files a time of use in the future, at most a day from now. They may take half of the limit; beyond it, those
  // that are kept for the shortest time are the first to go.
  void Pin(std::span<const RecordUse> records, std::span<const int64_t> until_ns) override;
  void Remove(std::span<const RecordId> ids) override;

  std::string Find(std::span<const RecordId> ids, std::span<uint8_t> found) override;
  std::vector<ReadResult> Read(std::span<const RecordId> ids) override;

 private:
  struct Entry {
    int64_t bytes = 0, modified_ns = 0;
  };

  std::string PathOf(const std::string& name) const { return config_.folder + "/" + name; }
  // Returns the error's text.
  std::string WriteFileOf(const RecordToWrite& record);
  int64_t TimeOfWrite(const RecordToWrite& record) const;
  ReadResult ReadFileOf(const RecordId& id);
  // Counts the files, those of other processes included, removes what died processes left, and evicts.
  FileError Scan();
  int64_t UsedBytes() const;
  void SetUse(const std::string& name, int64_t modified_ns);
  void Erase(const std::string& name);
  // Counts a file that is there, if it is another process's that has not been counted yet.
  void Know(const std::string& name);
  void Add(const std::string& name, Entry entry);
  std::vector<std::string> EvictionOrder() const;
  void EvictTo(int64_t bytes);
  // With the mutex.
  void Count(const std::string& name, int64_t bytes);
  void AgeFuture(std::vector<FileEntry>& files, int64_t now) const;
  // Writes identity.json where it is missing or damaged.
  FileError WriteIdentity(int64_t modified_ns);
  FileError WriteOnce(const std::string& name, std::span<const std::span<const uint8_t>> parts, int64_t modified_ns);

  RecordFolderConfig config_;
  const std::string identity_name_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, Entry> files_;  // by name
  bool scanning_ = false;
  std::vector<std::string> erased_during_scan_;
  int64_t used_bytes_ = 0, own_bytes_ = 0, evictions_ = 0;
  int64_t written_since_scan_ = 0;
  double scanned_at_ = 0, scan_pause_ = 0;
};

}  // namespace kvanta::store
