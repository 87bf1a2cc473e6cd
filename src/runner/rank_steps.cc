#include "runner/rank_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <string_view>
#include <type_traits>

#include "base/math.h"
#include "cache/block_table.h"
#include "cache/state_records.h"
#include "kvanta/rank_lost_error.h"
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

// Reads what Put has written, by the same build. Throws RankLostError for a step that rank 0 cannot have sent.
class MessageReader {
 public:
  MessageReader(std::span<const uint8_t> bytes, int ranks) : bytes_(bytes), ranks_(ranks) {}

  [[noreturn]] void Refuse(std::string_view why) const {
    throw RankLostError(0, ranks_, fmt::format("it sent a step that is not valid: {}", why));
  }
  void Check(bool valid, std::string_view why) const {
    if (!valid) Refuse(why);
  }

  template <class T>
  void Take(std::vector<T>& values, int64_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    Check(count >= 0 && static_cast<uint64_t>(count) <= bytes_.size() / sizeof(T), "its message is too short");
    const size_t size = static_cast<size_t>(count) * sizeof(T);
    values.resize(static_cast<size_t>(count));
    if (size > 0) std::memcpy(values.data(), bytes_.data(), size);
    bytes_ = bytes_.subspan(size);
  }
  template <class T>
  T Take() {
    static_assert(std::is_trivially_copyable_v<T>);
    Check(sizeof(T) <= bytes_.size(), "its message is too short");
    T value;
    std::memcpy(&value, bytes_.data(), sizeof(T));
    bytes_ = bytes_.subspan(sizeof(T));
    return value;
  }
  bool AtEnd() const noexcept { return bytes_.empty(); }

 private:
  std::span<const uint8_t> bytes_;
  const int ranks_;
};

struct ItemHeader {
  int64_t start = 0, tokens = 0, first_output = 0;
};

int64_t PageCount(const ItemHeader& item, const cache::PagePool& pool) {
  return CeilDiv(item.start + item.tokens, int64_t{pool.Layout().page_size});
}

bool RoundsStates(const cache::PagePool& pool, int group) {
  const formats::CacheLayout& layout = pool.Layout();
  return layout.state_code != formats::StateCode::kFloat32 &&
         std::ranges::any_of(layout.layers, [&](const formats::LayerScheme& layer) {
           return layer.group == group && layer.IsRecurrent();
         });
}

bool IsRecord(const cache::RecordId& record, const cache::PagePool& pool) {
  const bool has_kind = cache::KindIndex(record.kind) < std::size(cache::kPageKinds);
  return record.group >= 0 && record.group < pool.Groups() && has_kind &&
         pool.References(record.group, record.kind, record.page) > 0;
}

// Repeats a change that is valid for the pool.
void Repeat(const cache::RecordChange& change, const MessageReader& reader, cache::PagePool& pool,
            ThreadPool& threads) {
  reader.Check(IsRecord(change.record, pool), "a record of the cache");
  if (change.kind == cache::RecordChangeKind::kRelease) return pool.ReleaseMemory(change.record);
  const cache::RecordId coded{change.record.group, cache::PageKind::kQuantized, change.coded};
  const bool restores = change.kind == cache::RecordChangeKind::kRestoreState;
  reader.Check(restores || change.kind == cache::RecordChangeKind::kRoundState, "the change of a record");
  reader.Check(RoundsStates(pool, change.record.group) && change.record.kind == cache::PageKind::kExact,
               "a state of the cache");
  reader.Check((change.coded == cache::kNoPage && !restores) || IsRecord(coded, pool), "the code of a state");
  cache::ChangeState(pool, change, &threads);
}

// An item and the memory that it views.
struct ReceivedItem {
  std::vector<int32_t> tokens;
  std::vector<cache::BlockTable> tables;  // [group]
  std::vector<const cache::PageRef*> pages;
  RunItem item;
};

void TakeItem(MessageReader& reader, const cache::PagePool& pool, ReceivedItem& received) {
  constexpr int64_t kMaxStart = int64_t{1} << 40;
  const auto header = reader.Take<ItemHeader>();
  reader.Check(header.start >= 0 && header.start <= kMaxStart, "the start of a sequence");
  reader.Check(header.tokens > 0, "a sequence without tokens");
  reader.Check(header.first_output >= 0 && header.first_output <= header.tokens, "the outputs of a sequence");
  reader.Take(received.tokens, header.tokens);
  received.tables.resize(static_cast<size_t>(pool.Groups()));
  received.pages.clear();
  for (cache::BlockTable& table : received.tables) {
    reader.Take(table, PageCount(header, pool));
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
  const std::vector<cache::RecordChange> changes = pool_.TakeChanges();
  Put(message_, std::ssize(changes));
  Put(message_, changes.data(), std::ssize(changes));
  for (const RunItem& item : items) {
    const ItemHeader header{.start = item.start, .tokens = std::ssize(item.tokens), .first_output = item.first_output};
    Put(message_, header);
    Put(message_, item.tokens.data(), header.tokens);
    for (int group = 0; group < pool_.Groups(); ++group) Put(message_, item.pages[group], PageCount(header, pool_));
  }
  ranks_.Broadcast(message_);
}

void StepSender::SendLogits(int64_t first, int64_t count, bool for_samples) {
  message_.clear();
  Put(message_, StepKind::kLogits);
  Put(message_, first);
  Put(message_, count);
  Put(message_, for_samples);
  ranks_.Broadcast(message_);
}

void FollowSteps(parallel::Communicator& ranks, cache::PagePool& pool, Runner& runner, attention::Backend& backend,
                 ThreadPool& threads) {
  std::vector<uint8_t> message;
  std::vector<cache::RecordChange> changes;
  std::vector<ReceivedItem> received;
  std::vector<RunItem> items;
  for (;;) {
    ranks.Broadcast(message);
    MessageReader reader(message, ranks.Size());
    const auto kind = reader.Take<StepKind>();
    if (kind == StepKind::kEnd) return;
    if (kind == StepKind::kLogits) {
      const auto first = reader.Take<int64_t>(), count = reader.Take<int64_t>();
      reader.Check(count >= 0 && count <= runner.MaxLogitRows() && first >= 0 && first <= runner.MaxRows() - count,
                   "the rows of logits");
      const bool for_samples = reader.Take<uint8_t>() != 0;
      reader.Check(!for_samples || runner.SamplesOnDevice(), "samples of a GPU");
      runner.FollowLogits(first, count, for_samples);
    } else {
      reader.Check(kind == StepKind::kForward, "its kind");
      reader.Take(changes, reader.Take<int64_t>());
      for (const cache::RecordChange& change : changes) Repeat(change, reader, pool, threads);
      items.clear();
      int64_t rows = 0;
      for (size_t i = 0; !reader.AtEnd(); ++i) {
        if (received.size() == i) received.emplace_back();
        TakeItem(reader, pool, received[i]);
        items.push_back(received[i].item);
        rows += std::ssize(received[i].tokens);
      }
      reader.Check(rows > 0 && rows <= runner.MaxRows(), "its number of tokens");
      runner.Begin(items, backend);
    }
    ranks.Check();
  }
}

}  // namespace kvanta::runner
