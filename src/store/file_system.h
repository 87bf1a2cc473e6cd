// Files of the store: whole ones or none. Errors are returned, since the engine goes on without a file.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvanta::store {

// 0, or the errno of what failed.
using FileError = int;

// Writes the parts to a temporary file next to `path`, which then replaces `path` atomically. modified_ns: the
// file's time of modification, in nanoseconds since 1970.
FileError WriteFile(const std::string& path, std::span<const std::span<const uint8_t>> parts, int64_t modified_ns);

// Reads a regular file of at most `limit` bytes; EFBIG beyond, EINVAL for anything that is no regular file, links
// included.
FileError ReadFile(const std::string& path, size_t limit, std::vector<uint8_t>& bytes);

// 0: it exists and can be read.
FileError CheckFile(const std::string& path);
inline bool FileExists(const std::string& path) {
  return CheckFile(path) == 0;
}
FileError RemoveFile(const std::string& path);
FileError SetModified(const std::string& path, int64_t modified_ns);
// Creates a folder and its parents, which only their owner can enter. No error if the folder is there.
FileError MakeFolder(const std::string& path);

struct FileEntry {
  std::string path;  // relative to the folder
  int64_t bytes = 0;
  int64_t modified_ns = 0;
};

// Regular file of this path.
std::optional<FileEntry> FindFile(const std::string& path);
// Regular files at most `depth` folders below `folder`; skips what cannot be read and what begins a link.
FileError ListFiles(const std::string& folder, int depth, std::vector<FileEntry>& files);

// Nanoseconds since 1970.
int64_t WallClockNs();

// Name of a temporary file of WriteFile, which a process that died may have left behind.
bool IsTemporary(const std::string& path);

}  // namespace kvanta::store
