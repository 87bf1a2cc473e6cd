#include "store/redis_client.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <new>
#include <vector>

#include "base/clock.h"
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

constexpr double kLeastBytesPerSecond = 4e6;  // slowest rate allowed for a batch, in addition to kBatchSeconds
constexpr double kBatchSeconds = 2;
constexpr size_t kChunkBytes = 256 << 10;  // sent or received at once
constexpr int kMaxElements = 4096;         // elements of an array in a reply

// The functions with which hiredis makes its replies.
const redisReplyObjectFunctions& DefaultFunctions() {
  static const redisReplyObjectFunctions functions = [] {
    const std::unique_ptr<redisReader, decltype(&redisReaderFree)> reader(redisReaderCreate(), &redisReaderFree);
    if (reader == nullptr) throw std::bad_alloc();
    return *reader->fn;
  }();
  return functions;
}

}  // namespace

RedisUrl ParseRedisUrl(std::string_view text) {
  RedisUrl url;
  const size_t end = text.find("://");
  if (end == text.npos) throw InputError("kv_store: no URL; it has the form redis://host:port");
  const std::string_view scheme = text.substr(0, end);
  if (scheme != "redis" && scheme != "rediss") {
    throw InputError(fmt::format("kv_store: scheme {} is unknown; there are: redis, rediss", Quote(scheme)));
  }
  url.tls = scheme == "rediss";
  std::string_view rest = text.substr(end + 3);
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

void RedisCommands::Add(std::span<const std::string_view> words) {
  std::vector<const char*> data;
  std::vector<size_t> sizes;
  for (const std::string_view word : words) {
    data.push_back(word.data());
    sizes.push_back(word.size());
  }
  char* text = nullptr;
  const auto size = redisFormatCommandArgv(&text, static_cast<int>(words.size()), data.data(), sizes.data());
  if (size < 0) throw std::bad_alloc();
  const std::unique_ptr<char, decltype(&redisFreeCommand)> owned(text, &redisFreeCommand);
  bytes_.append(text, static_cast<size_t>(size));
  ++count_;
}

// hiredis would reserve as many elements as the server says. Versions differ in the type of their number.
ReplyReader::ReplyReader() : functions_(DefaultFunctions()) {
  functions_.createArray = [](const redisReadTask* task, auto elements) -> void* {
    if (static_cast<int64_t>(elements) < 0 || static_cast<int64_t>(elements) > kMaxElements) return nullptr;
    return DefaultFunctions().createArray(task, elements);
  };
  reader_.reset(redisReaderCreateWithFunctions(&functions_));
  if (reader_ == nullptr) throw std::bad_alloc();
}

void ReplyReader::Feed(std::span<const uint8_t> bytes) {
  if (bytes.size() > allowed_bytes_) throw ConnectionError("a reply is longer than what was asked for");
  allowed_bytes_ -= bytes.size();
  if (redisReaderFeed(reader_.get(), reinterpret_cast<const char*>(bytes.data()), bytes.size()) != REDIS_OK) {
    throw std::bad_alloc();
  }
}

Reply ReplyReader::Take() {
  void* reply = nullptr;
  if (redisReaderGetReply(reader_.get(), &reply) != REDIS_OK) {
    throw ConnectionError(fmt::format("no reply of Redis: {}", Sanitize(reader_->errstr)));
  }
  return Reply(static_cast<redisReply*>(reply));
}

RedisConnection::RedisConnection(const RedisUrl& url, const std::atomic<double>& end_by, double answer_seconds,
                                 Resolver& resolver)
    : answer_seconds_(answer_seconds) {
  const double deadline = Now() + answer_seconds;
  connection_ = ConnectTcp(url.host, url.port, deadline, resolver);
  if (url.tls) {
    const TlsFiles files{.ca = url.ca_file, .certificate = url.certificate_file, .key = url.key_file};
    connection_ = ConnectTls(std::move(connection_), url.host, files, deadline);
  }
  if (!url.password.empty()) {
    RedisCommands commands;
    if (url.user.empty()) {
      commands.Add({"AUTH", url.password});
    } else {
      commands.Add({"AUTH", url.user, url.password});
    }
    Expect(commands, "AUTH", end_by);
  }
  if (url.database != 0) {
    RedisCommands commands;
    commands.Add({"SELECT", std::to_string(url.database)});
    Expect(commands, "SELECT", end_by);
  }
}

void RedisConnection::Expect(const RedisCommands& commands, const char* what, const std::atomic<double>& end_by) {
  const std::vector<Reply> replies = Run(commands, 0, end_by);
  if (replies[0]->type != REDIS_REPLY_ERROR) return;
  // The first word alone: servers quote the words of commands that they do not know.
  const std::string_view text(replies[0]->str, replies[0]->len);
  throw ConnectionError(fmt::format("{} was refused: {}", what, Sanitize(text.substr(0, text.find(' ')))));
}

std::vector<Reply> RedisConnection::Run(const RedisCommands& commands, size_t reply_bytes,
                                        const std::atomic<double>& end_by) {
  const size_t bytes = reply_bytes + kReplyOverhead * static_cast<size_t>(commands.Count());
  const double deadline =
      Now() + kBatchSeconds + static_cast<double>(bytes + commands.Bytes().size()) / kLeastBytesPerSecond;
  const auto next_deadline = [&] { return std::min({deadline, end_by.load(), Now() + answer_seconds_}); };
  for (auto rest = commands.Bytes(); !rest.empty(); rest = rest.subspan(std::min(kChunkBytes, rest.size()))) {
    connection_->Send(rest.first(std::min(kChunkBytes, rest.size())), next_deadline());
  }
  reader_.AllowBytes(bytes);
  std::vector<uint8_t> buffer(kChunkBytes);
  std::vector<Reply> replies;
  while (std::ssize(replies) < commands.Count()) {
    if (Reply reply = reader_.Take()) {
      replies.push_back(std::move(reply));
      continue;
    }
    const size_t received = connection_->Receive(buffer, next_deadline());
    reader_.Feed(std::span(buffer).first(received));
  }
  return replies;
}

}  // namespace kvanta::store
