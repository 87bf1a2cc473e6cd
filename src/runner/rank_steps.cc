#include "runner/rank_steps.h"

#include <cstring>
#include <exception>
#include <type_traits>

#include "base/math.h"
#include "cache/block_table.h"
#include "runner/runner.h"

namespace kvanta::runner {
namespace {

enum class StepKind : uint8_t { kForward, kLogits, kEnd };

template <class T>
void Put(std::vector<uint8_t>& message, const T* values, int64_t count) {
  static_assert(std::is_trivially_copyable_v<T>);
  const size_t end = message.size(), bytes = static_cast<size_t>(count) * sizeof(T);
  message.resize(end + bytes);
  if (bytes > 0) std::memcpy(message.data() + end, values, bytes);
}
template <class T>
void Put(std::vector<uint8_t>& message, const T& value) {
  Put(message, &value, 1);
}

// Reads what Put has written, by the same build.
class MessageReader {
 public:
  explicit MessageReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  template <class T>
  void Take(T* values, int64_t count) {
    const size_t size = static_cast<size_t>(count) * sizeof(T);
    if (size > 0) std::memcpy(values, bytes_.data(), size);
    bytes_ = bytes_.subspan(size);
  }
  template <class T>
  T Take() {
    T value;
    Take(&value, 1);
    return value;
  }
  bool AtEnd() const noexcept { return bytes_.empty(); }

 private:
  std::span<const uint8_t> bytes_;
};

struct ItemHeader {
  int64_t start = 0, tokens = 0, first_output = 0;
};

int64_t PageCount(const ItemHeader& item, const cache::PagePool& pool) {
  return CeilDiv(item.start + item.tokens, int64_t{pool.Layout().page_size});
}

// An item and the memory that it views.
struct ReceivedItem {
  std::vector<int32_t> tokens;
  std::vector<cache::BlockTable> tables;  // [group]
  std::vector<const cache::PageRef*> pages;
  RunItem item;
};

void TakeItem(MessageReader& reader, const cache::PagePool& pool, ReceivedItem& received) {
  const auto header = reader.Take<ItemHeader>();
  received.tokens.resize(static_cast<size_t>(header.tokens));
  reader.Take(received.tokens.data(), header.tokens);
  received.tables.resize(static_cast<size_t>(pool.Groups()));
  received.pages.clear();
  for (cache::BlockTable& table : received.tables) {
    table.resize(static_cast<size_t>(PageCount(header, pool)));
    reader.Take(table.data(), std::ssize(table));
    received.pages.push_back(table.data());
  }
  received.item = {.tokens = received.tokens,
                   .start = header.start,
                   .pages = received.pages.data(),
                   .first_output = header.first_output};
}

}  // namespace

StepSender::~StepSender() {
  try {
    message_.clear();
    Put(message_, StepKind::kEnd);
    ranks_.Broadcast(message_);
  } catch (const std::exception&) {  // a lost rank needs no end
  }
}

void StepSender::SendForward(std::span<const RunItem> items) {
  message_.clear();
  Put(message_, StepKind::kForward);
  const std::vector<cache::RecordId> released = pool_.TakeReleased();
  Put(message_, std::ssize(released));
  Put(message_, released.data(), std::ssize(released));
  for (const RunItem& item : items) {
    const ItemHeader header{.start = item.start, .tokens = std::ssize(item.tokens), .first_output = item.first_output};
    Put(message_, header);
    Put(message_, item.tokens.data(), header.tokens);
    for (int group = 0; group < pool_.Groups(); ++group) Put(message_, item.pages[group], PageCount(header, pool_));
  }
  ranks_.Broadcast(message_);
}

void StepSender::SendLogits(int64_t first, int64_t count) {
  message_.clear();
  Put(message_, StepKind::kLogits);
  Put(message_, first);
  Put(message_, count);
  ranks_.Broadcast(message_);
}

void FollowSteps(parallel::Communicator& ranks, cache::PagePool& pool, Runner& runner, attention::Backend& backend) {
  std::vector<uint8_t> message;
  std::vector<cache::RecordId> released;
  std::vector<ReceivedItem> received;
  std::vector<RunItem> items;
  for (;;) {
    ranks.Broadcast(message);
    MessageReader reader(message);
    const auto kind = reader.Take<StepKind>();
    if (kind == StepKind::kEnd) return;
    if (kind == StepKind::kLogits) {
      const auto first = reader.Take<int64_t>();
      runner.Logits(first, reader.Take<int64_t>());
    } else {
      released.resize(static_cast<size_t>(reader.Take<int64_t>()));
      reader.Take(released.data(), std::ssize(released));
      for (const cache::RecordId& record : released) pool.ReleaseMemory(record);
      items.clear();
      for (size_t i = 0; !reader.AtEnd(); ++i) {
        if (received.size() == i) received.emplace_back();
        TakeItem(reader, pool, received[i]);
        items.push_back(received[i].item);
      }
      runner.Begin(items, backend);
    }
    ranks.Check();
  }
}

}  // namespace kvanta::runner
