#include "base/memory_map.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "kvanta/error.h"

namespace kvanta {

MemoryMap::MemoryMap(const std::string& path) : MemoryMap() {  // delegates: the destructor closes the file on errors
  // O_NONBLOCK: opening a named pipe must not wait for a writer; it is refused below.
  file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file_ < 0) throw InputError(fmt::format("{}: cannot open: {}", path, std::strerror(errno)));
  struct stat status {};
  if (::fstat(file_, &status) != 0) {
    throw InputError(fmt::format("{}: cannot read its size: {}", path, std::strerror(errno)));
  }
  if (!S_ISREG(status.st_mode)) throw InputError(fmt::format("{}: not a regular file", path));
  bytes_ = static_cast<size_t>(status.st_size);
  modified_ns_ = int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
  if (bytes_ == 0) return;
  void* data = ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, file_, 0);
  if (data == MAP_FAILED) {
    throw ResourceError(fmt::format("{}: cannot map {} bytes: {}", path, bytes_, std::strerror(errno)));
  }
  data_ = static_cast<const uint8_t*>(data);
}

MemoryMap::~MemoryMap() {
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), bytes_);
  if (file_ >= 0) ::close(file_);
}

MemoryMap::MemoryMap(MemoryMap&& other) noexcept
    : file_(std::exchange(other.file_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      modified_ns_(std::exchange(other.modified_ns_, 0)) {}

MemoryMap& MemoryMap::operator=(MemoryMap&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(modified_ns_, other.modified_ns_);
  return *this;
}

void MemoryMap::ReleasePages(std::span<const uint8_t> bytes) const noexcept {
  if (!Contains(bytes)) return;
  // Linux maps this much around a page that is touched; a neighbour that needs it maps it again.
  constexpr size_t kFaultAround = size_t{64} << 10;
  const auto first = static_cast<size_t>(bytes.data() - data_);
  const size_t begin = first / kFaultAround * kFaultAround;
  const size_t end = std::min(bytes_, (first + bytes.size() + kFaultAround - 1) / kFaultAround * kFaultAround);
  ::madvise(const_cast<uint8_t*>(data_) + begin, end - begin, MADV_DONTNEED);
}

void MemoryMap::EvictPages(std::span<const uint8_t> bytes) const noexcept {
  if (!Contains(bytes)) return;
  ReleasePages(bytes);
  ::posix_fadvise(file_, bytes.data() - data_, static_cast<off_t>(bytes.size()), POSIX_FADV_DONTNEED);
}

}  // namespace kvanta
