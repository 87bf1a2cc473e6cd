#include "store/record_store.h"

#include <algorithm>

#include "store/load.h"
#include "store/record_folder.h"
#include "store/record_memory.h"
#include "store/redis_server.h"

namespace kvanta::store {
namespace {

constexpr double kCloseSeconds = 10;   // limit for writing what is queued at the end
constexpr double kReadEndSeconds = 1;  // limit for waiting for a read at the end

}  // namespace

RecordStore::RecordStore(RecordStoreConfig config, const cache::KvCacheSpec& spec)
    : config_(std::move(config)), spec_(spec), identity_(IdentityKey(config_.identity)) {
  if (config_.memory) {
    auto memory = std::make_unique<RecordMemory>(config_.memory, spec_);
    memory_ = memory.get();
    AddTier(Place::kHost, std::move(memory));
  }
  if (!config_.folder.empty()) {
    AddTier(Place::kFolder, std::make_unique<RecordFolder>(RecordFolderConfig{.folder = config_.folder,
                                                                              .limit_bytes = config_.limit_bytes,
                                                                              .identity = config_.identity,
                                                                              .max_file_bytes = MaxRecordBytes(),
                                                                              .now = config_.now}));
  }
  if (!config_.server.empty()) {
    AddTier(Place::kServer, MakeRedisServer({.url = config_.server,
                                             .ttl_seconds = config_.server_ttl_seconds,
                                             .identity = identity_,
                                             .max_record_bytes = MaxRecordBytes(),
                                             .now = config_.now,
                                             .answer_seconds = config_.answer_seconds}));
  }
}

std::shared_ptr<RecordStore> RecordStore::Open(RecordStoreConfig config, const cache::KvCacheSpec& spec) {
  std::shared_ptr<RecordStore> store(new RecordStore(std::move(config), spec));
  try {
    for (Tier& tier : store->tiers_) tier.writer->Start(store);
    store->loader_.Start([store](const std::stop_token& stop, IoThread::Lock& lock) { store->LoadLoop(stop, lock); });
  } catch (...) {
    store->Close();
    throw;
  }
  return store;
}

void RecordStore::Close() noexcept {
  const double now = config_.now();
  const double write_by = now + kCloseSeconds;
  loader_.RequestStop();
  for (Tier& tier : tiers_) {
    tier.writer->RequestStop(write_by);
    tier.backend->EndCalls(kCloseSeconds - 1);
  }
  loader_.End(now + kReadEndSeconds);
  for (Tier& tier : tiers_) tier.writer->End();
}

RecordStore::~RecordStore() = default;

// With its header.
size_t RecordStore::MaxRecordBytes() const {
  int64_t longest = 0;
  for (const auto& kinds : config_.record_bytes) longest = std::max(longest, *std::ranges::max_element(kinds));
  return kPageHeaderBytes + static_cast<size_t>(longest) + sizeof(int32_t) * static_cast<size_t>(spec_.page_size);
}

void RecordStore::AddTier(Place place, std::unique_ptr<RecordBackend> backend) {
  auto writer =
      std::make_unique<RecordWriter>(*backend, identity_, config_.before_write, config_.now, config_.on_progress);
  tiers_.push_back(
      {.place = place, .backend = std::move(backend), .writer = std::move(writer), .stats = {}, .error_latch = {}});
}

std::string RecordStore::TakeWarning() {
  for (Tier& tier : tiers_) {
    std::string warning = tier.writer->TakeWarning();
    if (warning.empty()) {
      const std::lock_guard lock(mutex_);
      warning = tier.error_latch.Take();
    }
    if (!warning.empty()) return warning;
  }
  return {};
}

CacheTierStats RecordStore::StatsOf(Place place) const {
  const auto tier = std::ranges::find(tiers_, place, &Tier::place);
  CacheTierStats stats;
  if (tier == tiers_.end()) return stats;
  {
    const std::lock_guard lock(mutex_);
    stats = tier->stats;
  }
  tier->backend->Describe(stats);
  tier->writer->Count(stats);
  return stats;
}

void RecordStore::WriteBehind(const RecordUse& use, const PageKey* parent, std::span<const int32_t> tokens,
                              const std::function<void(uint8_t* to)>& copy) {
  const int64_t bytes = RecordBytes(use.id.group, use.id.kind);
  std::shared_ptr<const RecordContent> content;
  for (Tier& tier : tiers_) {
    if (!tier.writer->ShouldWrite(use.id, bytes)) {
      tier.writer->Touch(use);
      continue;
    }
    if (!content) {
      // One copy for all places: where the host's memory takes the record, the others write it from there.
      Buffer payload;
      if (tier.place == Place::kHost) payload = memory_->Allocate(bytes);
      if (!payload) payload = OwnBytes(std::vector<uint8_t>(static_cast<size_t>(bytes)));
      copy(payload.data());
      content = std::make_shared<const RecordContent>(RecordContent{.parent = parent != nullptr ? *parent : PageKey{},
                                                                    .tokens = {tokens.begin(), tokens.end()},
                                                                    .payload = std::move(payload)});
    }
    tier.writer->Write(use, content);
  }
}

void RecordStore::Pin(const RecordId& id, int64_t index, double seconds) {
  const int64_t until_ns = WallClockNs() + static_cast<int64_t>(seconds * 1e9);
  for (Tier& tier : tiers_) tier.writer->Pin({id, index}, until_ns);
}

void RecordStore::Drop(const RecordId& id) {
  for (Tier& tier : tiers_) tier.writer->Drop(id);
}

void RecordStore::Flush() {
  for (Tier& tier : tiers_) tier.writer->Flush();
}

RecordStore::Writes RecordStore::QueuedWrites() const {
  Writes writes = {};
  for (const Tier& tier : tiers_) writes[static_cast<size_t>(tier.place)] = tier.writer->Queued();
  return writes;
}

bool RecordStore::AreWritten(const Writes& writes) const {
  return std::ranges::all_of(
      tiers_, [&](const Tier& tier) { return tier.writer->HasEnded(writes[static_cast<size_t>(tier.place)]); });
}

}  // namespace kvanta::store
