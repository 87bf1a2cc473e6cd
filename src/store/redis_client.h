// URL of a Redis server, and a connection to it: batches of commands and their replies, formatted and parsed by
// hiredis. What a server sends is bounded by what was asked for, in bytes and in time.
#pragma once

#include <hiredis/hiredis.h>

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/connection.h"

namespace kvanta::store {

// URL of a Redis server: redis[s]://[[user]:password@]host[:port][/database][?ssl_ca_certs=FILE&...].
struct RedisUrl {
  bool tls = false;
  std::string host = {};  // name or address, an IPv6 one without brackets
  int port = 6379;
  int database = 0;
  std::string user = {}, password = {};  // empty: none
  // Files in PEM format. Empty: the system's authorities, no certificate of the client.
  std::string ca_file = {}, certificate_file = {}, key_file = {};
};

// Throws InputError. Its text has nothing of the URL but scheme and names of parameters: any other part of an
// invalid URL may be a password.
RedisUrl ParseRedisUrl(std::string_view text);

struct ReplyDeleter {
  void operator()(redisReply* reply) const noexcept { freeReplyObject(reply); }
};
using Reply = std::unique_ptr<redisReply, ReplyDeleter>;

// Bytes of a reply besides its values, at most.
inline constexpr size_t kReplyOverhead = 256;

// Commands that are sent at once.
class RedisCommands {
 public:
  explicit RedisCommands() = default;
  void Add(std::span<const std::string_view> words);
  void Add(std::initializer_list<std::string_view> words) { Add(std::span(words.begin(), words.size())); }

  int64_t Count() const noexcept { return count_; }
  std::span<const uint8_t> Bytes() const noexcept {
    return {reinterpret_cast<const uint8_t*>(bytes_.data()), bytes_.size()};
  }

 private:
  std::string bytes_;
  int64_t count_ = 0;
};

// Parses replies from bytes as they come.
class ReplyReader {
 public:
  ReplyReader();
  ReplyReader(const ReplyReader&) = delete;
  ReplyReader& operator=(const ReplyReader&) = delete;
  // Takes bytes of the server, at most as many as AllowBytes() allowed; throws ConnectionError for more.
  void Feed(std::span<const uint8_t> bytes);
  // Next reply, if it is complete. Throws ConnectionError for what is no reply.
  Reply Take();
  void AllowBytes(size_t bytes) noexcept { allowed_bytes_ = bytes; }

 private:
  struct ReaderDeleter {
    void operator()(redisReader* reader) const noexcept { redisReaderFree(reader); }
  };
  redisReplyObjectFunctions functions_;
  std::unique_ptr<redisReader, ReaderDeleter> reader_;
  size_t allowed_bytes_ = 0;
};

class RedisConnection {
 public:
  // Connects, authenticates and selects the database. answer_seconds: for which the server may send nothing. Throws
  // ConnectionError.
  RedisConnection(const RedisUrl& url, const std::atomic<double>& end_by, double answer_seconds, Resolver& resolver);

  // Sends the commands and returns their replies, in order. reply_bytes: of all values together, at most. end_by: given
  // up then, whatever comes; may change meanwhile. Throws ConnectionError; the connection is of no use then.
  std::vector<Reply> Run(const RedisCommands& commands, size_t reply_bytes, const std::atomic<double>& end_by);

 private:
  void Expect(const RedisCommands& commands, const char* what, const std::atomic<double>& end_by);

  const double answer_seconds_;
  std::unique_ptr<Connection> connection_;
  ReplyReader reader_;
};

}  // namespace kvanta::store
