// A Redis server, or one that speaks its protocol, that keeps records for several machines.
#pragma once

#include <memory>
#include <string>

#include "base/clock.h"
#include "store/record_backend.h"

namespace kvanta::store {

struct RedisServerConfig {
  std::string url;
  int64_t ttl_seconds = 0;  // after the last use; 0: as the server evicts
  PageKey identity = {};
  size_t max_record_bytes = 0;  // with its header; longer values are not read
  Clock now = Now;              // clock of the pauses between attempts to connect
  double answer_seconds = 1;    // wait for a server, or its name server, that does not answer
};

// Throws InputError for an invalid URL.
void CheckServerUrl(const std::string& url);
// redis:// and rediss://. Throws InputError for an invalid URL. Connects later, and again when a connection is lost.
std::unique_ptr<RecordBackend> MakeRedisServer(const RedisServerConfig& config);
// The URL without user and password, for messages.
std::string RedactUrl(std::string_view url);

}  // namespace kvanta::store
