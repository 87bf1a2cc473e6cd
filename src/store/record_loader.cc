// The loading thread of the page store.
#include <fmt/format.h>

#include <algorithm>

#include "cache/prefix_hit.h"
#include "store/load.h"

namespace kvanta::store {
namespace {

constexpr int64_t kMaxBufferedBytes = int64_t{64} << 20;

}  // namespace

bool RecordStore::IsStalled() const {
  return loader_.Hangs(kStallSeconds);
}

// True if others are read before it.
bool RecordStore::AwaitsTurn(const Load& load) const {
  return load.state == LoadState::kLoading && loads_.front().get() != &load;
}

double RecordStore::LastMoveBefore(const Load& load) const {
  const std::lock_guard lock(mutex_);
  return AwaitsTurn(load) ? loader_.LastMove() : 0;
}

RecordStore::LoadHandle RecordStore::Lookup(std::span<const int32_t> tokens, std::string_view salt, int64_t max_pages,
                                            std::vector<uint8_t> present) {
  auto load = std::make_shared<Load>();
  load->tokens.assign(tokens.begin(), tokens.begin() + max_pages * spec_.page_size);
  load->salt = salt;
  load->max_pages = max_pages;
  load->present = std::move(present);
  const std::lock_guard lock(mutex_);
  if (IsStalled()) return nullptr;
  lookups_.push_back(load);
  load_work_.notify_one();
  return load;
}

LoadState RecordStore::State(const Load& load) const {
  const std::lock_guard lock(mutex_);
  return load.state;
}

int64_t RecordStore::Tokens(const Load& load) const {
  const std::lock_guard lock(mutex_);
  return load.added_tokens;
}

void RecordStore::Begin(const LoadHandle& load) {
  const std::lock_guard lock(mutex_);
  if (load->state != LoadState::kFound) return;
  loads_.push_back(load);
  load->state = LoadState::kLoading;
  load_work_.notify_one();
}

std::optional<LoadedPage> RecordStore::Take(Load& load) {
  const std::lock_guard lock(mutex_);
  if (load.ready.empty()) return std::nullopt;
  LoadedPage page = std::move(load.ready.front());
  load.ready.pop_front();
  load.ready_bytes -= page.Bytes();
  buffered_bytes_ -= page.Bytes();
  load_work_.notify_one();
  return page;
}

void RecordStore::Cancel(Load& load, bool overdue) {
  const std::lock_guard lock(mutex_);
  const bool is_fault = overdue && (!AwaitsTurn(load) || IsStalled());
  load.cancelled = true;
  load.state = LoadState::kDone;
  buffered_bytes_ -= load.ready_bytes;
  load.ready_bytes = 0;
  load.ready.clear();
  load_work_.notify_one();
  if (!is_fault) return;
  Tier& tier = tiers_[read_tier_];
  ++tier.stats.read_errors;
  tier.error_latch.Report(tier.backend->Name(), "pages cannot be read in time", "it is slow or does not answer");
}

void RecordStore::SetComputeRate(double seconds_per_token) {
  const std::lock_guard lock(mutex_);
  seconds_per_token_ = seconds_per_token;
}

void RecordStore::LoadLoop(const std::stop_token& stop, IoThread::Lock& lock) {
  for (;;) {
    load_work_.wait(lock, stop, [this] {
      return !lookups_.empty() ||
             (!loads_.empty() && (loads_.front()->cancelled || buffered_bytes_ < kMaxBufferedBytes));
    });
    if (stop.stop_requested()) return;
    const bool is_lookup = !lookups_.empty();  // lookups first: most find nothing, and their owners wait
    std::deque<LoadHandle>& queue = is_lookup ? lookups_ : loads_;
    const LoadHandle load = queue.front();
    if (is_lookup || load->cancelled) queue.pop_front();
    if (load->cancelled) continue;
    LoadState found = LoadState::kDone;
    std::optional<LoadedPage> page;
    loader_.Call(lock, [&] {
      try {
        if (is_lookup) {
          found = FindRecords(*load);
        } else {
          page = ReadPage(*load);
        }
      } catch (const std::exception&) {  // no memory: the hit ends here
      }
    });
    if (stop.stop_requested()) return;  // the owner may be gone
    if (load->cancelled) continue;
    if (is_lookup) {
      load->state = found;
    } else if (page) {
      buffered_bytes_ += page->Bytes();
      load->ready_bytes += page->Bytes();
      load->ready.push_back(std::move(*page));
    } else {
      loads_.pop_front();
      load->state = LoadState::kDone;
      CountHit(*load);
    }
    lock.unlock();
    config_.on_progress();
    lock.lock();
  }
}

// Next page with what a hit reads of it and the memory lacks; empty when all were read. Where a record turns out to be
// missing or damaged, the hit ends earlier.
std::optional<LoadedPage> RecordStore::ReadPage(Load& load) {
  while (load.hit > load.memory_hit && load.next_page < load.hit) {
    const int64_t hit = load.hit;
    LoadedPage page{.index = load.next_page++, .records = {}};
    for (size_t g = 0; g < spec_.groups.size() && load.hit == hit; ++g) {
      for (const cache::PageKind kind : cache::kPageKinds) {
        LoadedPage::Record record{.group = static_cast<int>(g), .kind = kind, .payload = {}};
        const size_t at = cache::RecordIndex(spec_, page.index, record.group, kind);
        if (load.present[at] != 0 || !ReadsAfterHit(spec_.groups[g], page.index, hit, kind)) continue;
        if (ReadRecordOf(load, page.index, record)) {
          load.present[at] = 1;
          page.records.push_back(std::move(record));
          continue;
        }
        load.stored[at] = 0;
        load.hit = Load::Hit(spec_, load.max_pages,
                             [&](size_t each) { return (load.present[each] | load.stored[each]) != 0; });
        load.next_page = 0;
        break;
      }
    }
    if (page.records.empty() && page.index < load.memory_pages) continue;
    load.memory_pages = std::max(load.memory_pages, page.index + 1);
    return page;
  }
  return std::nullopt;
}

// Reads the records from `page` on that the hit needs of a tier, as many as are best read at once.
void RecordStore::Fetch(size_t tier, Load& load, int64_t page) {
  RecordBackend& backend = *tiers_[tier].backend;
  std::vector<RecordId> ids;
  std::vector<size_t> places;
  int64_t bytes = 0;
  for (; page < load.hit && (ids.empty() || bytes < backend.BatchBytes()); ++page) {
    for (int g = 0; g < static_cast<int>(spec_.groups.size()); ++g) {
      for (const cache::PageKind kind : cache::kPageKinds) {
        const size_t at = cache::RecordIndex(spec_, page, g, kind);
        if (load.present[at] != 0 || load.stored[at] != tier + 1 || load.fetched.contains(at)) continue;
        if (!ReadsAfterHit(spec_.groups[static_cast<size_t>(g)], page, load.hit, kind)) continue;
        if (!ids.empty() && bytes >= backend.BatchBytes()) continue;
        ids.push_back({load.keys[static_cast<size_t>(page)], g, kind});
        places.push_back(at);
        bytes += RecordBytes(g, kind);
      }
    }
  }
  {
    const std::lock_guard lock(mutex_);
    read_tier_ = tier;
  }
  const double start = config_.now();
  if (config_.before_read) config_.before_read();
  std::vector<ReadResult> results = backend.Read(ids);
  const double seconds = config_.now() - start;
  const bool failed = results[0].outcome == ReadResult::Outcome::kFailed;
  const std::string fault = results[0].fault;
  int64_t read_bytes = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    read_bytes += std::ssize(results[i].content ? results[i].content->Payload() : results[i].bytes);
    load.fetched.insert_or_assign(places[i], std::move(results[i]));
  }
  const std::lock_guard lock(mutex_);
  Tier& from = tiers_[tier];
  from.stats.read_seconds += seconds;
  if (read_bytes > 0) from.seconds_per_byte.Add(seconds / static_cast<double>(read_bytes));
  if (!failed) return;
  ++from.stats.read_errors;
  from.error_latch.Report(from.backend->Name(), "pages cannot be read", fault);
}

// Gives `record` the payload of a result, if that is the record of a page with these token ids. Otherwise returns why
// it is not.
std::string RecordStore::CheckRecord(ReadResult result, const RecordId& id, std::span<const int32_t> tokens,
                                     LoadedPage::Record& record) const {
  if (result.content) {
    if (!std::ranges::equal(result.content->tokens, tokens)) return "it has other token ids";
    const Buffer& payload = result.content->payload;
    record.payload = {std::shared_ptr<void>(std::const_pointer_cast<RecordContent>(result.content), payload.data()),
                      payload.bytes()};  // shares the content: what is read is not evicted
    return {};
  }
  const auto bytes = static_cast<size_t>(RecordBytes(record.group, record.kind));
  const PageFile view = ReadRecord(result.bytes, identity_, id, tokens, bytes);
  if (!view.fault.empty()) return view.fault;
  const size_t head = result.bytes.size() - bytes;
  record.payload = OwnBytes(std::move(result.bytes)).Part(head, bytes);
  return {};
}

bool RecordStore::ReadRecordOf(Load& load, int64_t page, LoadedPage::Record& record) {
  const size_t at = cache::RecordIndex(spec_, page, record.group, record.kind);
  if (load.stored[at] == 0) return false;
  const size_t index = load.stored[at] - size_t{1};
  if (!load.fetched.contains(at)) Fetch(index, load, page);
  ReadResult result = std::move(load.fetched.extract(at).mapped());
  const RecordId id{load.keys[static_cast<size_t>(page)], record.group, record.kind};
  Tier& tier = tiers_[index];
  std::string fault = result.fault;
  const ReadResult::Outcome outcome = result.outcome;
  if (outcome == ReadResult::Outcome::kRead) {
    fault = CheckRecord(std::move(result), id, load.TokensOf(spec_, page), record);
    if (fault.empty()) {
      tier.writer->Touch({id, page});
      const std::lock_guard lock(mutex_);
      tier.stats.read_bytes += static_cast<int64_t>(record.payload.bytes());
      tier.error_latch.End();
      return true;
    }
  } else if (outcome != ReadResult::Outcome::kDamaged) {
    if (outcome == ReadResult::Outcome::kFailed) GiveUp(index, load);
    return false;
  }
  tier.writer->Drop(id);
  const std::lock_guard lock(mutex_);
  ++tier.stats.damaged_files;
  tier.error_latch.Report(tier.backend->Name(), "a damaged record was removed",
                          fmt::format("{}: {}", tier.backend->NameOf(id), fault));
  return false;
}

// Reads nothing more of a tier that does not answer.
void RecordStore::GiveUp(size_t tier, Load& load) {
  for (size_t at = 0; at < load.stored.size(); ++at) {
    if (load.present[at] == 0 && load.stored[at] == tier + 1) load.stored[at] = 0;
  }
}

// With the mutex. A page counts as one of the farthest tier that it needed.
void RecordStore::CountHit(const Load& load) {
  for (int64_t page = load.memory_hit; page < load.hit; ++page) {
    uint8_t farthest = 1;
    for (int g = 0; g < static_cast<int>(spec_.groups.size()); ++g) {
      for (const cache::PageKind kind : cache::kPageKinds) {
        if (!ReadsAfterHit(spec_.groups[static_cast<size_t>(g)], page, load.hit, kind)) continue;
        farthest = std::max(farthest, load.stored[cache::RecordIndex(spec_, page, g, kind)]);
      }
    }
    tiers_[farthest - size_t{1}].stats.hit_tokens += spec_.page_size;
  }
}

}  // namespace kvanta::store
