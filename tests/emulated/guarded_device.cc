#include "emulated/guarded_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace kvanta::testing {

// One address range, each part allocated once. The address sanitizer tracks host allocations only: under it, buffers
// are allocated on the host and never closed.
struct GuardedDevice::Arena {
#ifdef KVANTA_SANITIZED
  void* Allocate(size_t /*bytes*/) {
    return nullptr;
  }
  void Protect(int /*protection*/) noexcept {}
#else
  static constexpr size_t kBytes = size_t{64} << 30;  // address space
  static constexpr size_t kPage = 4096;

  Arena()
      : base(static_cast<uint8_t*>(
            mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
    if (base == MAP_FAILED) throw std::bad_alloc();
  }
  ~Arena() {
    munmap(base, kBytes);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* Allocate(size_t bytes) {
    uint8_t* data = base + used;
    // Aligned to 256 bytes, like cudaMalloc, with a gap between buffers.
    used += (bytes + 511) / 256 * 256;
    if (used > kBytes) throw std::bad_alloc();
    Protect(protection_);
    return data;
  }
  void Protect(int protection) noexcept {
    protection_ = protection;
    mprotect(base, (used + kPage - 1) / kPage * kPage, protection);
  }

  uint8_t* base;
  size_t used = 0;
  int protection_ = PROT_NONE;
#endif
};

namespace {

class GuardedReservation final : public Reservation {
 public:
  GuardedReservation(Buffer memory) : memory_(std::move(memory)) {}
  uint8_t* data() const noexcept override { return memory_.data(); }
  size_t bytes() const noexcept override { return memory_.bytes(); }
  bool Commit(size_t /*offset*/, size_t /*bytes*/) noexcept override { return true; }
  void Release(size_t /*offset*/, size_t /*bytes*/) noexcept override {}

 private:
  Buffer memory_;
};

}  // namespace

GuardedDevice::GuardedDevice() : arena_(std::make_shared<Arena>()) {}

Buffer GuardedDevice::Allocate(size_t bytes) {
  CheckNotCapturing("an allocation");
  void* data = arena_->Allocate(std::max<size_t>(bytes, 1));
  if (data == nullptr) return Cpu().Allocate(bytes);
  return {std::shared_ptr<void>(data, [arena = arena_](void*) {}), bytes};  // fresh pages are zeros
}

std::unique_ptr<Reservation> GuardedDevice::Reserve(size_t bytes) {
  return std::make_unique<GuardedReservation>(Allocate(bytes));
}

void GuardedDevice::CopyIn(void* device, const void* host, size_t bytes) {
  CheckNotCapturing("a copy from the host");
  const Access access(*this);
  std::memcpy(device, host, bytes);
}
Buffer GuardedDevice::AllocateHost(size_t bytes) {
  Buffer memory = Cpu().Allocate(bytes);
  page_locked_.emplace_back(memory.data(), bytes);
  return memory;
}
void GuardedDevice::CopyInAsync(void* device, const void* host, size_t bytes) {
  CheckNotCapturing("a copy from the host");
  const auto* from = static_cast<const uint8_t*>(host);
  const bool page_locked = std::ranges::any_of(page_locked_, [&](const auto& range) {
    return from >= range.first && from + bytes <= range.first + range.second;
  });
  async_bytes_ += static_cast<int64_t>(bytes);
  page_locked_bytes_ += page_locked ? static_cast<int64_t>(bytes) : 0;
  copies_.push_back({device, host, bytes});
  pending_ = true;
}
void GuardedDevice::CopyPending() {
  const std::vector<Copy> copies = std::exchange(copies_, {});
  for (const Copy& copy : copies) CopyIn(copy.device, copy.host, copy.bytes);
}
void GuardedDevice::CopyOut(void* host, const void* device, size_t bytes) {
  CopyOutAsync(host, device, bytes);
  Synchronize();
}
void GuardedDevice::CopyOutAsync(void* host, const void* device, size_t bytes) {
  if (capture_ != nullptr) {
    capture_->push_back([this, host, device, bytes] { CopyOutAsync(host, device, bytes); });
    return;
  }
  const Access access(*this);
  std::memcpy(host, device, bytes);
}
void GuardedDevice::Fill(void* device, uint8_t byte, size_t bytes) {
  CheckNotCapturing("a fill");
  const Access access(*this);
  std::memset(device, byte, bytes);
}

void GuardedDevice::Replay(const Graph& graph) {
  ++replays_;
  for (const auto& launch : graph) launch();
}

void GuardedDevice::Open() noexcept {
  if (!copies_.empty()) CopyPending();  // in the order of calls
  pending_ = true;
  if (open_count_++ == 0) arena_->Protect(PROT_READ | PROT_WRITE);
}
void GuardedDevice::Close() noexcept {
  if (--open_count_ == 0) arena_->Protect(PROT_NONE);
}

}  // namespace kvanta::testing
