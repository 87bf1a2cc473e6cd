#include "store/redis_connection.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <vector>

#include "base/clock.h"
#include "base/quote.h"

namespace kvanta::store {
namespace {

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
