#include "store/redis_url.h"

#include <fmt/format.h>

#include <charconv>

#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta::store {
namespace {

constexpr std::string_view kForm = "redis[s]://[[user]:password@]host[:port][/database]";
constexpr int kMaxDatabase = 1'000'000;

struct Parameter {
  std::string_view name;
  std::string RedisUrl::*value;
};
// As redis-py names them.
constexpr Parameter kParameters[] = {{"ssl_ca_certs", &RedisUrl::ca_file},
                                     {"ssl_certfile", &RedisUrl::certificate_file},
                                     {"ssl_keyfile", &RedisUrl::key_file}};

[[noreturn]] void Refuse(const std::string& why) {
  throw InputError(fmt::format("kv_store: {}; it has the form {}", why, kForm));
}

int Number(std::string_view text, std::string_view what, int min, int max) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < min || number > max) {
    Refuse(fmt::format("the {} must be a number from {} to {}", what, min, max));
  }
  return number;
}

std::string Decode(std::string_view text) {
  std::string decoded;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      decoded += text[i];
      continue;
    }
    uint8_t byte = 0;
    const std::string_view digits = text.substr(i + 1, 2);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), byte, 16);
    if (digits.size() != 2 || error != std::errc() || end != digits.data() + 2) {
      Refuse("a % must be followed by two hexadecimal digits");
    }
    decoded += static_cast<char>(byte);
    i += 2;
  }
  return decoded;
}

// Cuts `text` at the first `mark`, and returns what follows it.
std::string_view CutAt(std::string_view& text, char mark) {
  const size_t at = text.find(mark);
  if (at == text.npos) return {};
  const std::string_view rest = text.substr(at + 1);
  text = text.substr(0, at);
  return rest;
}

void ReadParameters(std::string_view query, RedisUrl& url) {
  while (!query.empty()) {
    std::string_view name = query;
    query = CutAt(name, '&');
    const std::string_view value = CutAt(name, '=');
    std::string names;
    bool known = false;
    for (const Parameter& parameter : kParameters) {
      names += fmt::format("{}{}", names.empty() ? "" : ", ", parameter.name);
      if (name != parameter.name) continue;
      url.*parameter.value = Decode(value);
      known = true;
    }
    if (!known) Refuse(fmt::format("parameter {} is unknown; there are: {}", Quote(name), names));
  }
  const bool has_files = !(url.ca_file + url.certificate_file + url.key_file).empty();
  if (has_files && !url.tls) Refuse("files of certificates need the scheme rediss");
  if (url.certificate_file.empty() != url.key_file.empty()) Refuse("ssl_certfile and ssl_keyfile need each other");
}

}  // namespace

RedisUrl ParseRedisUrl(std::string_view text) {
  RedisUrl url;
  const size_t scheme = text.find("://");
  url.tls = text.substr(0, scheme) == "rediss";
  std::string_view rest = text.substr(scheme + 3);
  if (const size_t at = rest.rfind('@'); at != rest.npos) {
    std::string_view user = rest.substr(0, at);
    rest = rest.substr(at + 1);
    url.password = Decode(CutAt(user, ':'));
    url.user = Decode(user);
  }
  ReadParameters(CutAt(rest, '?'), url);
  if (const std::string_view database = CutAt(rest, '/'); !database.empty()) {
    url.database = Number(database, "database", 0, kMaxDatabase);
  }
  if (rest.starts_with('[')) {  // an IPv6 address
    std::string_view host = rest.substr(1);
    if (host.find(']') == host.npos) Refuse("an address ends with ]");
    rest = CutAt(host, ']');
    url.host = host;
    if (!rest.empty() && !rest.starts_with(':')) Refuse("a : and the port must follow the address");
    if (!rest.empty()) url.port = Number(rest.substr(1), "port", 1, 65535);
  } else {
    const bool has_port = rest.find(':') != rest.npos;
    const std::string_view port = CutAt(rest, ':');
    url.host = rest;
    if (has_port) url.port = Number(port, "port", 1, 65535);
  }
  if (url.host.empty()) Refuse("there is no host");
  if (url.host.find_first_of(std::string_view("\0 ", 2)) != url.host.npos) Refuse("the host has a space");
  return url;
}

}  // namespace kvanta::store
