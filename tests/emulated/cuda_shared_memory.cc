#include "emulated/cuda_shared_memory.h"

#include <algorithm>

namespace kvanta::emulated {
namespace {

int Warp(const SharedAccess& access) noexcept {
  return access.thread / kWarp;
}

bool Ordered(const SharedAccess& before, const SharedAccess& now) noexcept {
  if (before.thread < 0 || before.thread == now.thread || before.block_time < now.block_time) return true;
  return Warp(before) == Warp(now) && before.warp_time < now.warp_time;
}

}  // namespace

SharedMemory::SharedMemory(int bytes, int threads)
    : bytes_(bytes),
      words_(static_cast<size_t>((bytes + kWordBytes - 1) / kWordBytes)),
      byte_histories_(kWordBytes * words_.size()),
      fences_(static_cast<size_t>(threads)) {}

void SharedMemory::Reset() {
  memory_.reset(new uint8_t[static_cast<size_t>(bytes_) + 16]);
  data_ = memory_.get() + (16 - reinterpret_cast<uintptr_t>(memory_.get()) % 16) % 16;
  ++runs_;
  std::ranges::fill(fences_, 0);
}

template <class F>
void SharedMemory::Visit(int64_t offset, int64_t count, F f) {
  const int64_t end = offset + count;
  for (int64_t first = offset / kWordBytes * kWordBytes; first < end; first += kWordBytes) {
    WordHistory& word = words_[static_cast<size_t>(first / kWordBytes)];
    if (word.run != runs_) word = {.run = runs_};
    const bool whole = first >= offset && first + kWordBytes <= end;
    if (whole && !word.by_byte) {
      f(word.all, first);
      continue;
    }
    History* const bytes = byte_histories_.data() + first;
    if (!word.by_byte) std::fill_n(bytes, kWordBytes, word.all);
    word.by_byte = true;
    for (int64_t i = std::max(first, offset); i < std::min(first + kWordBytes, end); ++i) f(bytes[i - first], i);
  }
}

void SharedMemory::Record(History& history, int64_t at, Access access, const SharedAccess& now) const {
  const SharedAccess& written = history.written;
  const SharedAccess& read = history.read;
  if (history.copy_pending) Stop("shared byte {}: an asynchronous copy to it was not waited for", at);
  if (!Ordered(written, now)) {
    Stop("shared byte {}: race with thread {}, which wrote it (no barrier between)", at, written.thread);
  }
  if (access == Access::kAsyncRead && written.thread >= 0 &&
      history.store > fences_[static_cast<size_t>(written.thread)]) {
    Stop("shared byte {}: read by a product, but thread {} has not fenced its store", at, written.thread);
  }
  const bool same_time = read.thread >= 0 && read.block_time == now.block_time;
  if (access != Access::kWrite) {
    if (written.thread < 0) Stop("shared byte {}: read before it was written", at);
    const bool same_warp = same_time && Warp(read) == Warp(now);
    history.many_warps = same_time && (history.many_warps || !same_warp);
    history.many_lanes =
        same_warp && read.warp_time == now.warp_time && (history.many_lanes || read.thread != now.thread);
    history.read = now;
    return;
  }
  const bool many_lanes = history.many_lanes && read.warp_time == now.warp_time;
  if (!Ordered(read, now) || (same_time && (history.many_warps || many_lanes))) {
    Stop("shared byte {}: race with thread {}, which read it (no barrier between)", at, read.thread);
  }
  history.written = now;
  history.store = stores_ + 1;
}

uint8_t* SharedMemory::At(int64_t offset, int64_t count, int alignment, Access access, const SharedAccess& now) {
  if (offset < 0 || count < 0 || offset + count > bytes_) {
    Stop("shared memory [{}, {}) of {} bytes", offset, offset + count, bytes_);
  }
  if (offset % alignment != 0) Stop("shared memory at {}, not a multiple of {}", offset, alignment);
  Visit(offset, count, [&](History& history, int64_t at) { Record(history, at, access, now); });
  if (access == Access::kWrite) ++stores_;
  return data_ + offset;
}

void SharedMemory::SetCopyPending(int64_t offset, int64_t count, bool pending) {
  Visit(offset, count, [pending](History& history, int64_t /*at*/) { history.copy_pending = pending; });
}

}  // namespace kvanta::emulated
