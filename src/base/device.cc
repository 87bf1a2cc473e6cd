#include "base/device.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "base/cgroup.h"
#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta {
namespace {

constexpr size_t kOsPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kAlignment = 64;

size_t RoundUp(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

int64_t MemAvailable() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  int64_t kib = 0;
  std::string unit;
  while (file >> key >> kib) {
    if (key == "MemAvailable:") return kib * 1024;
    std::getline(file, unit);
  }
  return std::numeric_limits<int64_t>::max();
}

void* Map(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    throw ResourceError(fmt::format("cannot reserve {} bytes of memory: {}", bytes, std::strerror(errno)));
  }
  madvise(data, bytes, MADV_HUGEPAGE);  // advice only: page walks cost a quarter of the bandwidth without it
  return data;
}

class CpuReservation final : public Reservation {
 public:
  explicit CpuReservation(size_t bytes) : bytes_(bytes), mapped_(RoundUp(std::max<size_t>(bytes, 1), kHugePage)) {
    // One huge page more than needed, so that the start can be aligned to one.
    base_ = static_cast<uint8_t*>(Map(mapped_ + kHugePage));
    data_ = base_ + (RoundUp(reinterpret_cast<uintptr_t>(base_), kHugePage) - reinterpret_cast<uintptr_t>(base_));
  }
  ~CpuReservation() override { munmap(base_, mapped_ + kHugePage); }
  CpuReservation(const CpuReservation&) = delete;
  CpuReservation& operator=(const CpuReservation&) = delete;

  uint8_t* data() const noexcept override { return data_; }
  size_t bytes() const noexcept override { return bytes_; }

  bool Commit(size_t /*offset*/, size_t /*bytes*/) noexcept override { return true; }
  void Release(size_t offset, size_t bytes) noexcept override {
    const size_t first = RoundUp(offset, kOsPage);  // only OS pages wholly inside; neighbours may be in use
    const size_t last = (offset + bytes) / kOsPage * kOsPage;
    if (last > first) madvise(data_ + first, last - first, MADV_DONTNEED);
  }

 private:
  size_t bytes_;
  size_t mapped_;
  uint8_t* base_;
  uint8_t* data_;
};

class CpuDevice final : public Device {
 public:
  std::string_view Name() const noexcept override { return "cpu"; }

  Buffer Allocate(size_t bytes) override {
    if (bytes >= kHugePage) {
      const int64_t available = AvailableBytes();
      if (bytes > static_cast<uint64_t>(available)) {
        throw ResourceError(fmt::format("{} of memory requested, {} available",
                                        FormatBytes(static_cast<int64_t>(bytes)), FormatBytes(available)));
      }
      auto mapping = std::make_shared<CpuReservation>(bytes);
      return {std::shared_ptr<void>(mapping, mapping->data()), bytes};
    }
    const size_t rounded = RoundUp(std::max<size_t>(bytes, 1), kAlignment);
    void* data = std::aligned_alloc(kAlignment, rounded);
    if (data == nullptr) throw ResourceError(fmt::format("cannot allocate {} bytes of memory", bytes));
    std::memset(data, 0, rounded);
    return {std::shared_ptr<void>(data, std::free), bytes};
  }

  std::unique_ptr<Reservation> Reserve(size_t bytes) override { return std::make_unique<CpuReservation>(bytes); }
  void CopyIn(void* device, const void* host, size_t bytes) override { std::memcpy(device, host, bytes); }
  void CopyOut(void* host, const void* device, size_t bytes) override { std::memcpy(host, device, bytes); }
  void Fill(void* device, uint8_t byte, size_t bytes) override { std::memset(device, byte, bytes); }
  int64_t AvailableBytes() const override { return std::min(MemAvailable(), CgroupAvailable()); }
};

}  // namespace

Device& Cpu() {
  static CpuDevice device;
  return device;
}

}  // namespace kvanta
