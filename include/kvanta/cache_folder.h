// Tiers of the prefix cache below the memory: their statistics, and what can be done with the folder of
// EngineConfig::kv_cache_dir without an engine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvanta {

// A tier as one engine uses it: the host's memory kv_offload_bytes, the folder kv_cache_dir or the server kv_store.
struct CacheTierStats {
  bool enabled = false;
  int64_t files = 0, bytes = 0, limit_bytes = 0;  // of a folder: of all processes, as of the last count; or of records
  int64_t own_bytes = 0;                          // of these, of this engine's model and cache format
  int64_t connects = 0;                           // to a server
  int64_t lookup_tokens = 0, hit_tokens = 0;      // prompt tokens that the memory lacked; of these, read
  int64_t declined_tokens = 0;                    // present, but cheaper to compute
  int64_t read_bytes = 0, written_bytes = 0;      // records
  double read_seconds = 0, write_seconds = 0;
  int64_t evictions = 0;                      // files of a folder, records in memory
  int64_t read_errors = 0, write_errors = 0;  // of the system, reads that took too long included
  int64_t damaged_files = 0;                  // records that were not whole, or others: removed
  int64_t dropped_records = 0;                // not written: the tier was behind or failed
};

// Pages that belong together: one model, cache format, page size, precision and instruction set.
struct CacheFolderEntry {
  std::string name;      // of the sub-folder
  std::string identity;  // JSON of all that the pages depend on besides their token ids; empty: not readable
  int64_t files = 0, bytes = 0, pages = 0;
  double last_used = 0;              // seconds since 1970
  std::vector<std::string> damaged;  // VerifyCacheFolder: "file: reason"
};

// Throw InputError if the folder cannot be read. Files that Kvanta did not write are left alone.
std::vector<CacheFolderEntry> ListCacheFolder(const std::string& folder);
// Reads every file; damaged ones are named, not removed.
std::vector<CacheFolderEntry> VerifyCacheFolder(const std::string& folder);
// Removes all pages and returns the number of files. Engines that use the folder go on.
int64_t ClearCacheFolder(const std::string& folder);

}  // namespace kvanta
