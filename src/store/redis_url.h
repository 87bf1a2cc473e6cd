// URL of a Redis server: redis[s]://[[user]:password@]host[:port][/database][?ssl_ca_certs=FILE&...].
#pragma once

#include <string>
#include <string_view>

namespace kvanta::store {

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

}  // namespace kvanta::store
