// Records as values of a Redis server (or one that speaks its protocol, as Valkey), under "kvanta:<identity>:<name>",
// the names of files. Reading and writing have a connection each.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "base/clock.h"
#include "base/math.h"
#include "base/quote.h"
#include "store/file_system.h"
#include "store/redis_client.h"
#include "store/redis_server.h"

namespace kvanta::store {
namespace {

constexpr int64_t kBatchBytes = int64_t{8} << 20;
constexpr size_t kKeysPerCommand = 16;  // keys of an MGET, during which a server does nothing else
constexpr double kMinConnectPause = 1, kMaxConnectPause = 60;  // seconds between attempts to connect
constexpr double kFreshSeconds = 60;                           // a use within this time of the last one is not sent
constexpr size_t kMaxKnown = 1'000'000;                        // records that this process remembers

// A command line is seen by all users of a machine, its environment is not.
RedisUrl WithPassword(RedisUrl url) {
  const char* password = std::getenv("KVANTA_KV_STORE_PASSWORD");
  if (url.password.empty() && password != nullptr) url.password = password;
  return url;
}

std::string ErrorText(const redisReply& reply) {
  if (reply.type != REDIS_REPLY_ERROR) return "another reply than asked for";
  const std::string_view text(reply.str, reply.len);
  const bool is_cluster = std::ranges::any_of(std::array{"MOVED ", "ASK ", "CROSSSLOT ", "CLUSTERDOWN "},
                                              [&](const char* begin) { return text.starts_with(begin); });
  return Sanitize(text) + (is_cluster ? " (a Redis Cluster is not supported: give one server)" : "");
}

// A connection that is made again when it is lost, at growing intervals.
class Link {
 public:
  Link(const RedisUrl& url, const RedisServerConfig& config, std::function<void()> on_connect)
      : url_(url), now_(config.now), answer_seconds_(config.answer_seconds), on_connect_(std::move(on_connect)) {}

  // The commands' replies. None if the server did not answer a moment ago: nothing was sent. Throws ConnectionError.
  // All commands may be sent twice: a connection that a server closed while it was idle shows only then. After a stall
  // they are not: it would be waited for twice.
  std::optional<std::vector<Reply>> Run(const RedisCommands& commands, size_t reply_bytes) {
    const std::lock_guard lock(mutex_);
    if (now_() < again_at_ || Now() > end_by_) return std::nullopt;
    for (bool used = connection_.has_value();; used = false) {
      try {
        if (!connection_) {
          connection_.emplace(url_, end_by_, answer_seconds_, resolver_);
          ++connects_;
          on_connect_();
        }
        std::vector<Reply> replies = connection_->Run(commands, reply_bytes, end_by_);
        pause_ = 0;
        return replies;
      } catch (const ConnectionError& error) {
        connection_.reset();
        const bool stalled = dynamic_cast<const ConnectionTimeout*>(&error) != nullptr;
        if (used && !stalled && Now() < end_by_) continue;
        last_error_ = error.what();
        pause_ = std::clamp(2 * pause_, kMinConnectPause, kMaxConnectPause);
        again_at_ = now_() + pause_;
        throw;
      } catch (...) {  // no memory: replies may still come
        connection_.reset();
        throw;
      }
    }
  }

  // Commands that are still in progress after `seconds` fail within the time of a stall.
  void EndAfter(double seconds) noexcept { end_by_ = Now() + seconds; }
  int64_t Connects() const noexcept { return connects_; }
  std::string LastError() {
    const std::lock_guard lock(mutex_);
    return last_error_;
  }

 private:
  const RedisUrl& url_;
  const Clock now_;  // clock of pauses; deadlines of sockets are on the clock of Now()
  const double answer_seconds_;
  const std::function<void()> on_connect_;
  std::mutex mutex_;
  Resolver resolver_;
  std::optional<RedisConnection> connection_;
  double again_at_ = 0, pause_ = 0;
  std::string last_error_;
  std::atomic<int64_t> connects_ = 0;
  std::atomic<double> end_by_ = std::numeric_limits<double>::infinity();
};

class RedisServer final : public RecordBackend {
 public:
  explicit RedisServer(const RedisServerConfig& config)
      : name_(fmt::format("kv_store = {}", Quote(RedactUrl(config.url)))),
        url_(WithPassword(ParseRedisUrl(config.url))),
        prefix_(fmt::format("kvanta:{}:", IdentityName(config.identity))),
        ttl_(config.ttl_seconds),
        max_record_bytes_(config.max_record_bytes),
        now_(config.now),
        reading_(url_, config, [this] { InvalidateAll(); }),
        writing_(url_, config, [this] { InvalidateAll(); }) {}

  std::string Name() const override { return name_; }
  std::string NameOf(const RecordId& id) const override { return prefix_ + FileName(id); }
  int64_t BatchBytes() const noexcept override { return kBatchBytes; }

  bool IsKnown(const RecordId& id) const override {
    const std::lock_guard lock(mutex_);
    return known_.contains(id);
  }
  bool NeedsTouch(const RecordId& id) const override {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(id);
    return found != known_.end() && now_() - found->second > kFreshSeconds;
  }
  void Invalidate(const RecordId& id) override {
    const std::lock_guard lock(mutex_);
    known_.erase(id);
  }
  void Describe(CacheTierStats& stats) const override {
    stats.enabled = true;
    stats.connects = reading_.Connects() + writing_.Connects();
  }

  void EndCalls(double write_seconds) noexcept override {
    reading_.EndAfter(0);
    writing_.EndAfter(write_seconds);
  }

  void Open() override {}
  WriteResult Write(std::span<const RecordToWrite> records) override;
  void Touch(std::span<const RecordUse> records) override {
    Renew(records, std::vector<int64_t>(records.size(), ttl_));
  }
  // The server evicts by its own rules, in which a pin is a use; but the record expires no earlier.
  void Pin(std::span<const RecordUse> records, std::span<const int64_t> until_ns) override;
  void Remove(std::span<const RecordId> ids) override;
  std::string Find(std::span<const RecordId> ids, std::span<uint8_t> found) override;
  std::vector<ReadResult> Read(std::span<const RecordId> ids) override;

 private:
  // Tells of uses; records[i] stays for seconds[i] from now on, if records expire.
  void Renew(std::span<const RecordUse> records, std::span<const int64_t> seconds);
  std::vector<const RecordToWrite*> Missing(std::span<const RecordToWrite> records, std::span<const Reply> replies);
  // The server may have been restarted.
  void InvalidateAll() {
    const std::lock_guard lock(mutex_);
    known_.clear();
  }
  void Know(const RecordId& id, double used_at) {
    const std::lock_guard lock(mutex_);
    if (known_.size() >= kMaxKnown) known_.clear();
    double& known = known_.try_emplace(id, used_at).first->second;
    known = std::max(known, used_at);
  }

  const std::string name_;
  const RedisUrl url_;
  const std::string prefix_;
  const int64_t ttl_;  // seconds; 0: none
  const size_t max_record_bytes_;
  const Clock now_;
  Link reading_, writing_;
  mutable std::mutex mutex_;
  std::unordered_map<RecordId, double, RecordHash> known_;  // time of the last use that was sent; pinned: later
};

// Records that the server does not have. A value of another length was not written by Kvanta.
std::vector<const RecordToWrite*> RedisServer::Missing(std::span<const RecordToWrite> records,
                                                       std::span<const Reply> lengths) {
  std::vector<const RecordToWrite*> missing;
  for (size_t i = 0; i < records.size(); ++i) {
    const RecordToWrite& record = records[i];
    const auto bytes = std::ssize(record.header) + std::ssize(record.content->Payload());
    if (lengths[i]->type == REDIS_REPLY_INTEGER && lengths[i]->integer == bytes) {
      Know(record.use.id, 0);
    } else {
      Invalidate(record.use.id);
      missing.push_back(&record);
    }
  }
  return missing;
}

WriteResult RedisServer::Write(std::span<const RecordToWrite> records) {
  WriteResult result;
  try {
    RedisCommands lengths;
    for (const RecordToWrite& record : records) lengths.Add({"STRLEN", NameOf(record.use.id)});
    const auto found = writing_.Run(lengths, 0);  // another machine may have written them
    if (!found) return {.error = writing_.LastError()};
    const std::vector<const RecordToWrite*> missing = Missing(records, *found);
    if (missing.empty()) return result;
    RedisCommands writes;
    std::string value;
    for (const RecordToWrite* record : missing) {
      value.assign(record->header.begin(), record->header.end());
      value.append(record->content->Payload().begin(), record->content->Payload().end());
      const std::string key = NameOf(record->use.id);
      if (ttl_ == 0) {
        writes.Add({"SET", key, value});
      } else {
        writes.Add({"SET", key, value, "EX", std::to_string(ttl_)});
      }
    }
    const auto written = writing_.Run(writes, 0);
    if (!written) return {.error = writing_.LastError()};
    for (size_t i = 0; i < written->size(); ++i) {
      const redisReply& reply = *(*written)[i];
      if (reply.type == REDIS_REPLY_STATUS) {
        Know(missing[i]->use.id, now_());
        result.bytes += std::ssize(missing[i]->content->Payload());
      } else if (result.error.empty()) {
        result.error = ErrorText(reply);
      }
    }
  } catch (const ConnectionError& error) {
    result.error = error.what();
  }
  return result;
}

void RedisServer::Pin(std::span<const RecordUse> records, std::span<const int64_t> until_ns) {
  std::vector<RecordUse> renewed;
  std::vector<int64_t> seconds;
  for (size_t i = 0; i < records.size(); ++i) {
    const int64_t rest = CeilDiv(until_ns[i] - WallClockNs(), int64_t{1'000'000'000});
    const bool outlives = ttl_ > 0 && rest > ttl_;
    if (!outlives && !NeedsTouch(records[i].id)) continue;
    renewed.push_back(records[i]);
    seconds.push_back(outlives ? rest : ttl_);
  }
  Renew(renewed, seconds);
}

// A record that has gone will be written again when it is used. One that is pinned becomes stale when its pin leaves no
// more time than a use gives, so that no use of this process shortens it.
void RedisServer::Renew(std::span<const RecordUse> records, std::span<const int64_t> seconds) {
  RedisCommands commands;
  for (size_t i = 0; i < records.size(); ++i) {
    if (ttl_ == 0) {
      commands.Add({"TOUCH", NameOf(records[i].id)});
    } else {
      commands.Add({"EXPIRE", NameOf(records[i].id), std::to_string(seconds[i])});
    }
  }
  try {
    const auto replies = writing_.Run(commands, 0);
    for (size_t i = 0; replies && i < replies->size(); ++i) {
      const redisReply& reply = *(*replies)[i];
      if (reply.type == REDIS_REPLY_INTEGER && reply.integer == 1) {
        Know(records[i].id, now_() + static_cast<double>(seconds[i] - ttl_));
      } else {
        Invalidate(records[i].id);
      }
    }
  } catch (const ConnectionError&) {  // tried again with the next use
  }
}

void RedisServer::Remove(std::span<const RecordId> ids) {
  RedisCommands commands;
  for (const RecordId& id : ids) commands.Add({"UNLINK", NameOf(id)});
  try {
    writing_.Run(commands, 0);
  } catch (const ConnectionError&) {  // it expires or is evicted in its time
  }
}

std::string RedisServer::Find(std::span<const RecordId> ids, std::span<uint8_t> found) {
  RedisCommands commands;
  for (const RecordId& id : ids) commands.Add({"STRLEN", NameOf(id)});
  std::string fault;
  try {
    const auto replies = reading_.Run(commands, 0);
    for (size_t i = 0; replies && i < replies->size(); ++i) {
      const redisReply& reply = *(*replies)[i];
      if (reply.type != REDIS_REPLY_INTEGER) {
        fault = fmt::format("{}: {}", NameOf(ids[i]), ErrorText(reply));
      } else if (reply.integer > static_cast<long long>(max_record_bytes_)) {
        fault = fmt::format("{} has {} bytes, a record at most {}", NameOf(ids[i]), reply.integer, max_record_bytes_);
      } else if (reply.integer > 0) {
        found[i] = 1;
      }
      if (found[i] == 0) Invalidate(ids[i]);
    }
  } catch (const ConnectionError& error) {
    return error.what();
  }
  return fault;
}

std::vector<ReadResult> RedisServer::Read(std::span<const RecordId> ids) {
  RedisCommands commands;
  for (size_t first = 0; first < ids.size(); first += kKeysPerCommand) {
    std::vector<std::string> words = {"MGET"};
    for (const RecordId& id : ids.subspan(first, std::min(kKeysPerCommand, ids.size() - first))) {
      words.push_back(NameOf(id));
    }
    commands.Add(std::vector<std::string_view>(words.begin(), words.end()));
  }
  std::vector<ReadResult> results(ids.size());
  std::string fault;
  try {
    const auto replies = reading_.Run(commands, ids.size() * (max_record_bytes_ + kReplyOverhead));
    if (!replies) fault = reading_.LastError();
    for (size_t i = 0; i < ids.size() && replies; ++i) {
      const redisReply& values = *(*replies)[i / kKeysPerCommand];
      if (values.type != REDIS_REPLY_ARRAY || i % kKeysPerCommand >= values.elements) {
        fault = values.type == REDIS_REPLY_ERROR ? ErrorText(values) : "the reply to MGET lacks values";
        break;
      }
      const redisReply& value = *values.element[i % kKeysPerCommand];
      if (value.type != REDIS_REPLY_STRING) {  // gone
        Invalidate(ids[i]);
        continue;
      }
      results[i].outcome = ReadResult::Outcome::kRead;
      results[i].bytes.assign(value.str, value.str + value.len);
      Know(ids[i], 0);
    }
  } catch (const ConnectionError& error) {
    fault = error.what();
  }
  if (fault.empty()) return results;
  for (ReadResult& result : results)
    result = {.outcome = ReadResult::Outcome::kFailed, .bytes = {}, .content = {}, .fault = fault};
  return results;
}

}  // namespace

std::string RedactUrl(std::string_view url) {
  const size_t at = url.rfind('@');
  if (at == url.npos) return std::string(url);
  const size_t scheme = url.find("://");
  const size_t begin = scheme == url.npos || scheme > at ? 0 : scheme + 3;
  return fmt::format("{}***{}", url.substr(0, begin), url.substr(at));
}

void CheckServerUrl(const std::string& url) {
  ParseRedisUrl(url);
}

std::unique_ptr<RecordBackend> MakeRedisServer(const RedisServerConfig& config) {
  return std::make_unique<RedisServer>(config);
}

}  // namespace kvanta::store
