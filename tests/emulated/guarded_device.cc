#include "emulated/guarded_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace kvanta::testing {

// One range of addresses, handed out once and never again. The address sanitizer knows allocations alone: under it each
// is one of the host's, and nothing is closed.
struct GuardedDevice::Arena {
#ifdef KVANTA_SANITIZED
  void* Take(size_t /*bytes*/) {
    return nullptr;
  }
  void Protect(int /*protection*/) noexcept {}
#else
  static constexpr size_t kBytes = size_t{64} << 30;  // of addresses
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

  void* Take(size_t bytes) {
    uint8_t* data = base + used;
    // 256 bytes as cudaMalloc does; then a gap, so that not even kernels see another buffer behind one's end.
    used += (bytes + 511) / 256 * 256;
    if (used > kBytes) throw std::bad_alloc();
    Protect(protection_now);
    return data;
  }
  void Protect(int protection) noexcept {
    protection_now = protection;
    mprotect(base, (used + kPage - 1) / kPage * kPage, protection);
  }

  uint8_t* base;
  size_t used = 0;
  int protection_now = PROT_NONE;
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
  RefuseRecorded("allocating");
  void* data = arena_->Take(std::max<size_t>(bytes, 1));
  if (data == nullptr) return Cpu().Allocate(bytes);
  return {std::shared_ptr<void>(data, [arena = arena_](void*) {}), bytes};  // zeros, as fresh pages are
}

std::unique_ptr<Reservation> GuardedDevice::Reserve(size_t bytes) {
  return std::make_unique<GuardedReservation>(Allocate(bytes));
}

void GuardedDevice::CopyIn(void* device, const void* host, size_t bytes) {
  RefuseRecorded("a copy from the host");
  const Opened opened(*this);
  std::memcpy(device, host, bytes);
}
void GuardedDevice::CopyOut(void* host, const void* device, size_t bytes) {
  CopyOutAsync(host, device, bytes);
  Wait();
}
void GuardedDevice::CopyOutAsync(void* host, const void* device, size_t bytes) {
  if (recording_ != nullptr) {
    recording_->push_back([this, host, device, bytes] { CopyOutAsync(host, device, bytes); });
    return;
  }
  const Opened opened(*this);
  std::memcpy(host, device, bytes);
}
void GuardedDevice::Fill(void* device, uint8_t byte, size_t bytes) {
  RefuseRecorded("filling");
  const Opened opened(*this);
  std::memset(device, byte, bytes);
}

void GuardedDevice::Replay(const Recording& recording) {
  ++replays_;
  for (const auto& begin : recording) begin();
}

void GuardedDevice::Open() noexcept {
  pending_ = true;
  if (open_++ == 0) arena_->Protect(PROT_READ | PROT_WRITE);
}
void GuardedDevice::Close() noexcept {
  if (--open_ == 0) arena_->Protect(PROT_NONE);
}

}  // namespace kvanta::testing
