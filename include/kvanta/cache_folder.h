// Tiers of the prefix cache below the memory: their statistics, and what can be done with the folder of
// EngineConfig::kv_cache_dir without an engine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvanta/metric.h"

namespace kvanta {

// EngineConfig's kv_offload_bytes, kv_cache_dir, kv_store.
enum class CacheTier : uint8_t { kHost, kDisk, kStore };

// A tier as one engine uses it.
struct CacheTierStats {
  bool enabled = false;
  int64_t files = 0, bytes = 0, limit_bytes = 0;  // of a folder: of all processes, as of the last count; or of records
  int64_t own_bytes = 0;                          // the part of this engine's model and cache format
  int64_t connects = 0;                           // to a server
  int64_t lookup_tokens = 0, hit_tokens = 0;      // prompt tokens that the memory lacked; of these, read
  int64_t declined_tokens = 0;                    // present, but cheaper to compute
  int64_t read_bytes = 0, written_bytes = 0;      // records
  double read_seconds = 0, write_seconds = 0;
  int64_t evictions = 0;                      // files of a folder, records in memory
  int64_t read_errors = 0, write_errors = 0;  // errors of the system, including reads that took too long
  int64_t damaged_files = 0;                  // records that were not whole, or others: removed
  int64_t dropped_records = 0;                // not written: the tier was behind or failed

  // Calls visit(name, pointer to member, metric) for every field that a tier of this kind has. The name is the one in
  // the tier's dictionary of LLM.stats(); the metric's follows "<tier>_cache_".
  template <class Visitor>
  static void VisitFields(CacheTier tier, Visitor&& visit) {
    const auto gauge = [&](const char* field, auto member, const char* name, const char* help) {
      visit(field, member, Metric{MetricKind::kGauge, name, help});
    };
    const auto counter = [&](const char* field, auto member, const char* name, const char* help) {
      visit(field, member, Metric{MetricKind::kCounter, name, help});
    };
    using S = CacheTierStats;
    visit("enabled", &S::enabled, Metric{});
    counter("lookup_tokens", &S::lookup_tokens, "queries", "Prompt tokens that nearer tiers lacked, looked up.");
    counter("hit_tokens", &S::hit_tokens, "hits", "Of these, read.");
    counter("declined_tokens", &S::declined_tokens, "declined", "Of these, there but cheaper to compute.");
    counter("read_bytes", &S::read_bytes, "read_bytes", "Bytes of pages read.");
    counter("written_bytes", &S::written_bytes, "written_bytes", "Bytes of pages written.");
    counter("read_seconds", &S::read_seconds, "read_seconds", "Time of reading.");
    counter("write_seconds", &S::write_seconds, "write_seconds", "Time of writing.");
    counter("read_errors", &S::read_errors, "read_errors", "Reads that failed or took too long.");
    counter("write_errors", &S::write_errors, "write_errors", "Writes that failed.");
    counter("dropped_records", &S::dropped_records, "dropped", "Records not written: the tier was behind or failed.");
    constexpr const char* kDamaged = "Records that were not whole, or another's: removed, never used.";
    switch (tier) {
      case CacheTier::kHost:
        gauge("records", &S::files, "records", "Records of pages in kv_offload_bytes of RAM.");
        gauge("bytes", &S::bytes, "used_bytes", "Their bytes.");
        gauge("limit_bytes", &S::limit_bytes, "limit_bytes", "Limit of these bytes.");
        counter("evictions", &S::evictions, "evictions", "Records that went for others.");
        break;
      case CacheTier::kDisk:
        gauge("files", &S::files, "files", "Files in kv_cache_dir.");
        gauge("bytes", &S::bytes, "used_bytes", "Their bytes, those of other processes included.");
        gauge("limit_bytes", &S::limit_bytes, "limit_bytes", "Limit of these bytes.");
        gauge("own_bytes", &S::own_bytes, "own_bytes", "Of these bytes, of this model in this cache format.");
        counter("evictions", &S::evictions, "evictions", "Files removed for others.");
        counter("damaged_files", &S::damaged_files, "damaged_files", kDamaged);
        break;
      case CacheTier::kStore:
        counter("connects", &S::connects, "connects", "Connections made to kv_store.");
        counter("damaged_records", &S::damaged_files, "damaged_records", kDamaged);
        break;
    }
  }
};

// Pages that belong together: one model, cache format, page size, precision and instruction set.
struct CacheFolderEntry {
  std::string name;      // name of the sub-folder
  std::string identity;  // JSON of all that the pages depend on besides their token ids; empty: not readable
  int64_t files = 0, bytes = 0, pages = 0;
  double last_used = 0;              // seconds since 1970
  std::vector<std::string> damaged;  // VerifyCacheFolder: "file: reason"
};

// Throw InputError if the folder cannot be read. Files that Kvanta did not write are left alone.
std::vector<CacheFolderEntry> ListCacheFolder(const std::string& folder);
// Reads every file; damaged ones are named, not removed.
std::vector<CacheFolderEntry> VerifyCacheFolder(const std::string& folder);

// One page file: of such a folder, or of Engine::ExportPage.
struct PageFileInfo {
  int version = 0;                          // of the file's format
  std::string identity_key = {}, key = {};  // of what the page depends on, of the page; hexadecimal digits
  std::string identity = {};                // JSON; empty: neither the file nor its folder has it
  int group = 0;                            // KV cache group
  bool exact = false;                       // the bf16 record of layers with exact pages
  std::vector<int32_t> tokens = {};
  int64_t payload_bytes = 0;
  std::string checksum = {};  // hexadecimal digits
  std::string fault = {};     // why the file is not used; what follows the fault is not filled in. Empty: it is whole
};
// Throws InputError if the file cannot be read.
PageFileInfo ShowPageFile(const std::string& path);

// Removes all pages and returns the number of files. Engines that use the folder go on.
int64_t ClearCacheFolder(const std::string& folder);

}  // namespace kvanta
