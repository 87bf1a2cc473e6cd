#include "store/record_servers.h"

#include <fmt/format.h>

#include "base/quote.h"
#include "kvanta/error.h"
#include "store/redis_server.h"

namespace kvanta::store {
namespace {

struct ServerKind {
  std::string_view scheme;
  std::unique_ptr<RecordBackend> (*make)(const RecordServerConfig& config);
};

constexpr ServerKind kServers[] = {{"redis", MakeRedisServer}, {"rediss", MakeRedisServer}};

}  // namespace

std::unique_ptr<RecordBackend> MakeRecordServer(const RecordServerConfig& config) {
  const std::string_view url = config.url;
  const size_t end = url.find("://");
  if (end == url.npos) throw InputError("kv_store: no URL; it has the form redis://host:port");
  const std::string_view scheme = url.substr(0, end);
  std::string schemes;
  for (const ServerKind& kind : kServers) {
    if (kind.scheme == scheme) return kind.make(config);
    schemes += fmt::format("{}{}", schemes.empty() ? "" : ", ", kind.scheme);
  }
  throw InputError(fmt::format("kv_store: scheme {} is unknown; there are: {}", Quote(scheme), schemes));
}

void CheckServerUrl(const std::string& url) {
  MakeRecordServer({.url = url});
}

std::string RedactUrl(std::string_view url) {
  const size_t at = url.rfind('@');
  if (at == url.npos) return std::string(url);
  const size_t scheme = url.find("://");
  const size_t begin = scheme == url.npos || scheme > at ? 0 : scheme + 3;
  return fmt::format("{}***{}", url.substr(0, begin), url.substr(at));
}

}  // namespace kvanta::store
