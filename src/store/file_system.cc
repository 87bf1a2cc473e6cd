#include "store/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <limits>
#include <memory>
#include <string_view>
#include <utility>

namespace kvanta::store {
namespace {

constexpr std::string_view kTemporary = ".tmp-";
constexpr int64_t kNanoseconds = 1'000'000'000;

struct Descriptor {
  explicit Descriptor(int number) : fd(number) {}
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int fd;
};

struct CloseFolder {
  void operator()(DIR* folder) const { ::closedir(folder); }
};

timespec TimeOf(int64_t ns) {
  return {.tv_sec = static_cast<time_t>(ns / kNanoseconds), .tv_nsec = static_cast<long>(ns % kNanoseconds)};
}

// Within a range whose differences do not overflow: a file may claim any year.
int64_t NsOf(const timespec& time) {
  constexpr int64_t kMaxSeconds = std::numeric_limits<int64_t>::max() / kNanoseconds / 2;
  return std::clamp(int64_t{time.tv_sec}, -kMaxSeconds, kMaxSeconds) * kNanoseconds + time.tv_nsec;
}

FileEntry EntryOf(const std::string& path, const struct stat& status) {
  return {.path = path, .bytes = status.st_size, .modified_ns = NsOf(status.st_mtim)};
}

FileError WriteAll(int fd, std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written < 0 ? errno : EIO;
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return 0;
}

FileError WriteParts(const std::string& path, std::span<const std::span<const uint8_t>> parts, int64_t modified_ns) {
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (file.fd < 0) return errno;
  for (const std::span<const uint8_t> part : parts) {
    if (const FileError error = WriteAll(file.fd, part)) return error;
  }
  const timespec times[2] = {TimeOf(modified_ns), TimeOf(modified_ns)};
  if (::futimens(file.fd, times) != 0) return errno;
  // NFS and quotas report a failed write here. No fsync: a file that a power cut tears has a wrong checksum.
  return ::close(std::exchange(file.fd, -1)) == 0 || errno == EINTR ? 0 : errno;
}

void ListBelow(const std::string& folder, const std::string& prefix, int depth, std::vector<FileEntry>& files) {
  const std::unique_ptr<DIR, CloseFolder> entries(::opendir(folder.c_str()));
  if (entries == nullptr) return;
  while (const dirent* entry = ::readdir(entries.get())) {
    const std::string name = entry->d_name;
    if (name == "." || name == "..") continue;
    struct stat status = {};
    if (::fstatat(::dirfd(entries.get()), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
    const std::string path = prefix.empty() ? name : fmt::format("{}/{}", prefix, name);
    if (S_ISREG(status.st_mode)) {
      files.push_back(EntryOf(path, status));
    } else if (S_ISDIR(status.st_mode) && depth > 0) {
      ListBelow(fmt::format("{}/{}", folder, name), path, depth - 1, files);
    }
  }
}

}  // namespace

FileError WriteFile(const std::string& path, std::span<const std::span<const uint8_t>> parts, int64_t modified_ns) {
  static std::atomic<uint64_t> count = 0;
  const size_t name = path.rfind('/') + 1;
  const std::string temporary = fmt::format("{}{}{}-{}-{}", std::string_view(path).substr(0, name), kTemporary,
                                            ::getpid(), WallClockNs(), count.fetch_add(1));
  FileError error = WriteParts(temporary, parts, modified_ns);
  if (error == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) ::unlink(temporary.c_str());
  return error;
}

FileError ReadFile(const std::string& path, size_t limit, std::vector<uint8_t>& bytes) {
  // O_NONBLOCK: a pipe in the file's place must not make the open wait.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (file.fd < 0) return errno == ELOOP ? EINVAL : errno;
  struct stat status = {};
  if (::fstat(file.fd, &status) != 0) return errno;
  if (!S_ISREG(status.st_mode)) return EINVAL;
  if (static_cast<uint64_t>(status.st_size) > limit) return EFBIG;
  bytes.resize(static_cast<size_t>(status.st_size));
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t more = ::read(file.fd, bytes.data() + done, bytes.size() - done);
    if (more < 0 && errno == EINTR) continue;
    if (more < 0) return errno;
    if (more == 0) break;
    done += static_cast<size_t>(more);
  }
  bytes.resize(done);
  return 0;
}

FileError CheckFile(const std::string& path) {
  return ::access(path.c_str(), R_OK) == 0 ? 0 : errno;
}

std::optional<FileEntry> FindFile(const std::string& path) {
  struct stat status = {};
  if (::lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return std::nullopt;
  return EntryOf(path, status);
}

FileError RemoveFile(const std::string& path) {
  return ::unlink(path.c_str()) == 0 ? 0 : errno;
}

FileError SetModified(const std::string& path, int64_t modified_ns) {
  const timespec times[2] = {TimeOf(modified_ns), TimeOf(modified_ns)};
  return ::utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW) == 0 ? 0 : errno;
}

FileError MakeFolder(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) == 0) return 0;
  const size_t parent = path.find_last_of('/');
  if (errno == ENOENT && parent != 0 && parent != std::string::npos) {
    if (const FileError error = MakeFolder(path.substr(0, parent))) return error;
    if (::mkdir(path.c_str(), 0700) == 0) return 0;
  }
  if (errno != EEXIST) return errno;
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) return errno;
  return S_ISDIR(status.st_mode) ? 0 : ENOTDIR;
}

FileError ListFiles(const std::string& folder, int depth, std::vector<FileEntry>& files) {
  const Descriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (opened.fd < 0) return errno;
  ListBelow(folder, "", depth, files);
  return 0;
}

int64_t WallClockNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

bool IsTemporary(const std::string& path) {
  return std::string_view(path).substr(path.rfind('/') + 1).starts_with(kTemporary);
}

}  // namespace kvanta::store
