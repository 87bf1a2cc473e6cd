// The loading thread of the page store.
#include <algorithm>

#include "base/clock.h"
#include "cache/prefix_hit.h"
#include "store/load.h"

namespace kvanta::store {
namespace {

constexpr int64_t kMaxBufferedBytes = int64_t{64} << 20;
constexpr double kStallSeconds = 2;   // a read that takes longer: the disk hangs
constexpr double kRetrySeconds = 30;  // between loads that the rates speak against, which measure them anew
constexpr double kRateShare = 0.1;    // of the latest measurement in the mean rate

// True if some hit reads the record.
bool MayBeRead(const cache::KvCacheGroup& group, int64_t page, cache::PageKind kind) {
  return kind == cache::PageKind::kQuantized ? group.NeedsQuantized(page, true)
                                             : group.NeedsExact(page, group.exact_before > 0);
}

template <class Has>
int64_t Hit(const cache::KvCacheSpec& spec, int64_t pages, Has has) {
  return cache::LongestHit(spec, pages, [&](int64_t page, int group, cache::PageKind kind) {
    return has(cache::RecordIndex(spec, page, group, kind));
  });
}

}  // namespace

bool RecordStore::IsStalled() const {
  return read_since_ != 0 && Now() - read_since_ > kStallSeconds;
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
  load.cancelled = true;
  load.state = LoadState::kDone;
  buffered_bytes_ -= load.ready_bytes;
  load.ready_bytes = 0;
  load.ready.clear();
  load_work_.notify_one();
  if (!overdue) return;
  ++stats_.read_errors;
  Warn(read_trouble_, "pages cannot be read in time", "the disk is slow or does not answer");
}

void RecordStore::SetComputeRate(double seconds_per_token) {
  const std::lock_guard lock(mutex_);
  seconds_per_token_ = seconds_per_token;
}

void RecordStore::LoadLoop(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  for (;;) {
    load_work_.wait(lock, stop, [this] {
      return !lookups_.empty() ||
             (!loads_.empty() && (loads_.front()->cancelled || buffered_bytes_ < kMaxBufferedBytes));
    });
    if (stop.stop_requested()) break;
    const bool is_lookup = !lookups_.empty();  // lookups first: most find nothing, and their owners wait
    std::deque<LoadHandle>& queue = is_lookup ? lookups_ : loads_;
    const LoadHandle load = queue.front();
    if (is_lookup || load->cancelled) queue.pop_front();
    if (load->cancelled) continue;
    read_since_ = Now();
    lock.unlock();
    LoadState found = LoadState::kDone;
    std::optional<LoadedPage> page;
    try {
      if (is_lookup) {
        found = FindRecords(*load);
      } else {
        page = ReadPage(*load);
      }
    } catch (const std::exception&) {  // no memory: the hit ends here
    }
    lock.lock();
    read_since_ = 0;
    if (stop.stop_requested()) break;  // the owner may be gone
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
      stats_.hit_tokens += std::max<int64_t>(0, load->hit - load->memory_hit) * spec_.page_size;
    }
    lock.unlock();
    config_.on_progress();
    lock.lock();
  }
  loader_ended_ = true;
  thread_ended_.notify_all();
}

// Finds the longest hit with the store's records. kDone if it is no longer than without, or not worth loading.
LoadState RecordStore::FindRecords(Load& load) {
  load.stored.assign(load.present.size(), 0);
  PageKey key = RootKey(folder_.Identity(), load.salt);
  const auto has = [&](size_t at) { return (load.present[at] | load.stored[at]) != 0; };
  bool may_continue = true;
  int64_t pages = 0;
  for (; pages < load.max_pages && may_continue; ++pages) {
    const auto page = static_cast<size_t>(pages * spec_.page_size);
    key = ChildKey(key, std::span(load.tokens).subspan(page, static_cast<size_t>(spec_.page_size)));
    load.keys.push_back(key);
    for (int g = 0; g < static_cast<int>(spec_.groups.size()); ++g) {
      const cache::KvCacheGroup& group = spec_.groups[static_cast<size_t>(g)];
      for (const cache::PageKind kind : cache::kPageKinds) {
        const size_t at = cache::RecordIndex(spec_, pages, g, kind);
        if (load.present[at] != 0) load.memory_pages = pages + 1;
        if (load.present[at] == 0 && MayBeRead(group, pages, kind)) load.stored[at] = folder_.Exists({key, g, kind});
      }
      // All hits beyond this page read it.
      const bool ends = group.visibility.IsFull() && group.NeedsQuantized(pages, true) &&
                        !has(cache::RecordIndex(spec_, pages, g, cache::PageKind::kQuantized));
      may_continue = may_continue && !ends;
    }
  }
  load.max_pages = pages;
  load.memory_hit = Hit(spec_, pages, [&](size_t at) { return load.present[at] != 0; });
  load.hit = Hit(spec_, pages, has);
  int64_t bytes = 0;
  for (int64_t page = 0; page < load.hit; ++page) {
    for (size_t g = 0; g < spec_.groups.size(); ++g) {
      for (const cache::PageKind kind : cache::kPageKinds) {
        const bool is_read = ReadsAfterHit(spec_.groups[g], page, load.hit, kind) &&
                             load.present[cache::RecordIndex(spec_, page, static_cast<int>(g), kind)] == 0;
        if (is_read) bytes += RecordBytes(static_cast<int>(g), kind);
      }
    }
  }
  const int64_t tokens = (load.hit - load.memory_hit) * spec_.page_size;
  const std::lock_guard lock(mutex_);
  stats_.lookup_tokens += std::ssize(load.tokens) - load.memory_hit * spec_.page_size;
  if (tokens == 0 || !IsWorthLoading(bytes, tokens)) return LoadState::kDone;
  load.added_tokens = tokens;
  return LoadState::kFound;
}

// With the mutex.
bool RecordStore::IsWorthLoading(int64_t bytes, int64_t tokens) {
  const double load_seconds = static_cast<double>(bytes) * seconds_per_byte_;
  const double compute_seconds = static_cast<double>(tokens) * seconds_per_token_;
  if (seconds_per_token_ == 0 || load_seconds <= compute_seconds) return true;
  if (Now() - tried_at_ > kRetrySeconds) {
    tried_at_ = Now();
    return true;
  }
  stats_.declined_tokens += tokens;
  return false;
}

// Next page with what a hit reads of it and the memory lacks; empty when all were read. Where a record turns out to be
// missing or damaged, the hit ends earlier.
std::optional<LoadedPage> RecordStore::ReadPage(Load& load) {
  while (load.hit > load.memory_hit && load.next_page < load.hit) {
    const int64_t hit = load.hit;
    LoadedPage page{.index = load.next_page++, .records = {}};
    for (size_t g = 0; g < spec_.groups.size() && load.hit == hit; ++g) {
      for (const cache::PageKind kind : cache::kPageKinds) {
        LoadedPage::Record record{.group = static_cast<int>(g), .kind = kind, .bytes = {}};
        const size_t at = cache::RecordIndex(spec_, page.index, record.group, kind);
        if (load.present[at] != 0 || !ReadsAfterHit(spec_.groups[g], page.index, hit, kind)) continue;
        if (ReadRecordOf(load, page.index, record)) {
          load.present[at] = 1;
          page.records.push_back(std::move(record));
          continue;
        }
        load.stored[at] = 0;
        load.hit =
            Hit(spec_, load.max_pages, [&](size_t each) { return (load.present[each] | load.stored[each]) != 0; });
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

bool RecordStore::ReadRecordOf(Load& load, int64_t page, LoadedPage::Record& record) {
  const int64_t bytes = RecordBytes(record.group, record.kind);
  record.bytes.resize(static_cast<size_t>(bytes));
  const auto tokens = std::span<const int32_t>(load.tokens)
                          .subspan(static_cast<size_t>(page * spec_.page_size), static_cast<size_t>(spec_.page_size));
  const RecordId id{load.keys[static_cast<size_t>(page)], record.group, record.kind};
  std::string fault;
  const double start = Now();
  if (config_.before_read) config_.before_read();
  const RecordFolder::Outcome outcome = folder_.Read(id, tokens, record.bytes, fault);
  const double seconds = Now() - start;
  if (outcome == RecordFolder::Outcome::kRead) folder_.Touch(id, page);
  const std::lock_guard lock(mutex_);
  stats_.read_seconds += seconds;
  switch (outcome) {
    case RecordFolder::Outcome::kRead: {
      stats_.read_bytes += bytes;
      const double rate = seconds / static_cast<double>(bytes);
      seconds_per_byte_ += (seconds_per_byte_ == 0 ? 1 : kRateShare) * (rate - seconds_per_byte_);
      read_trouble_ = false;
      return true;
    }
    case RecordFolder::Outcome::kDamaged:
      ++stats_.damaged_files;
      Warn(read_trouble_, "a damaged file was removed", fault);
      break;
    case RecordFolder::Outcome::kFailed:
      ++stats_.read_errors;
      Warn(read_trouble_, "pages cannot be read", fault);
      break;
    case RecordFolder::Outcome::kMissing:
      break;
  }
  return false;
}

}  // namespace kvanta::store
