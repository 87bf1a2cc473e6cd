#include "store/host_arena.h"

#include <fmt/format.h>

#include <iterator>

#include "base/math.h"
#include "kvanta/error.h"

namespace kvanta::store {
namespace {

constexpr int64_t kAlignment = 256;

}  // namespace

// A block in use. It brings the nodes of its range, so that freeing it needs no memory.
struct HostArena::Block {
  explicit Block(size_t size) : bytes(size) {
    Ranges ranges = {{0, 0}};
    range = ranges.extract(ranges.begin());
    Sizes sizes = {{0, 0}};
    size_entry = sizes.extract(sizes.begin());
  }
  ~Block() {
    if (arena) arena->Free(*this);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  std::shared_ptr<HostArena> arena = nullptr;  // null: nothing is allocated
  size_t offset = 0;
  size_t bytes;
  Ranges::node_type range;
  Sizes::node_type size_entry;
};

std::shared_ptr<HostArena> HostArena::Make(Device& device, int64_t bytes) {
  // Page-locked memory is never swapped out: more than there is would stop the machine.
  if (const int64_t available = Cpu().AvailableBytes(); bytes > available) {
    throw ResourceError(fmt::format("only {} bytes of memory are available", available));
  }
  return std::shared_ptr<HostArena>(new HostArena(device.AllocateHost(static_cast<size_t>(bytes))));
}

HostArena::HostArena(Buffer memory) : memory_(std::move(memory)) {
  const size_t bytes = memory_.bytes() / kAlignment * kAlignment;
  if (bytes == 0) return;
  free_.emplace(0, bytes);
  free_by_size_.emplace(bytes, 0);
}

Buffer HostArena::Allocate(int64_t bytes) {
  const auto block = std::make_shared<Block>(static_cast<size_t>(RoundUp(bytes, kAlignment)));
  if (!Take(*block)) return {};
  block->arena = shared_from_this();
  return {std::shared_ptr<void>(block, memory_.data() + block->offset), static_cast<size_t>(bytes)};
}

// Best fit: blocks of the same size follow each other in the same place.
bool HostArena::Take(Block& block) {
  const std::lock_guard lock(mutex_);
  const auto found = free_by_size_.lower_bound({block.bytes, 0});
  if (found == free_by_size_.end()) return false;
  auto size_entry = free_by_size_.extract(found);
  const auto [bytes, offset] = size_entry.value();
  auto range = free_.extract(offset);
  block.offset = offset;
  used_bytes_ += static_cast<int64_t>(block.bytes);
  if (bytes == block.bytes) return true;
  range.key() = offset + block.bytes;
  range.mapped() = bytes - block.bytes;
  size_entry.value() = {range.mapped(), range.key()};
  free_.insert(std::move(range));
  free_by_size_.insert(std::move(size_entry));
  return true;
}

void HostArena::Free(Block& block) noexcept {
  const std::lock_guard lock(mutex_);
  size_t begin = block.offset;
  size_t end = begin + block.bytes;
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == end) {
    end += next->second;
    free_by_size_.erase({next->second, next->first});
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      begin = before->first;
      free_by_size_.erase({before->second, before->first});
      free_.erase(before);
    }
  }
  block.range.key() = begin;
  block.range.mapped() = end - begin;
  block.size_entry.value() = {end - begin, begin};
  free_.insert(std::move(block.range));
  free_by_size_.insert(std::move(block.size_entry));
  used_bytes_ -= static_cast<int64_t>(block.bytes);
}

bool HostArena::Owns(const Buffer& block) const noexcept {
  return block.data() >= memory_.data() && block.data() < memory_.data() + memory_.bytes();
}

int64_t HostArena::UsedBytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

}  // namespace kvanta::store
