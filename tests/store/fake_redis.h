// A Redis server in this process, for what a real one never does: it answers as the test says.
#pragma once

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "store/redis_client.h"

namespace kvanta::store {

class FakeRedis {
 public:
  using Words = std::vector<std::string>;
  // Bytes to send; "" none. None: as a server does.
  using Answer = std::function<std::optional<std::string>(const Words& command)>;

  // port 0: a free one.
  explicit FakeRedis(int port = 0) { Listen(port); }
  ~FakeRedis() { Stop(); }
  FakeRedis(const FakeRedis&) = delete;
  FakeRedis& operator=(const FakeRedis&) = delete;

  int Port() const { return port_; }
  std::string Url() const { return fmt::format("redis://127.0.0.1:{}", port_); }

  void SetAnswer(Answer answer) {
    const std::lock_guard lock(mutex_);
    answer_ = std::move(answer);
  }
  // Closes the connection after the next answer.
  void CloseNext() { close_next_ = true; }

  std::map<std::string, std::string> Values() {
    const std::lock_guard lock(mutex_);
    return values_;
  }
  void SetValues(std::map<std::string, std::string> values) {
    const std::lock_guard lock(mutex_);
    values_ = std::move(values);
  }
  std::vector<Words> Commands() {
    const std::lock_guard lock(mutex_);
    return commands_;
  }

  void Stop() {
    stop_ = true;
    if (accepting_.joinable()) accepting_.join();
    for (std::thread& thread : serving_) thread.join();
    serving_.clear();
  }
  // After Stop(): a server on the same port that has lost its values.
  void Restart() {
    stop_ = false;
    SetValues({});
    Listen(port_);
  }

 private:
  void Listen(int port) {
    const int listening = socket(AF_INET, SOCK_STREAM, 0);
    const int on = 1;
    setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    if (bind(listening, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listening, 8) != 0 ||
        getsockname(listening, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      throw std::runtime_error("no port");
    }
    port_ = ntohs(address.sin_port);
    accepting_ = std::thread([this, listening] {
      while (IsReadable(listening))
        serving_.emplace_back([this, at = accept(listening, nullptr, nullptr)] { Serve(at); });
      close(listening);
    });
  }

  // Waits; false when the server stops.
  bool IsReadable(int file) const {
    while (!stop_) {
      pollfd waited = {.fd = file, .events = POLLIN, .revents = 0};
      if (poll(&waited, 1, 5) > 0) return true;
    }
    return false;
  }

  void Serve(int client) {
    const int on = 1;  // as a real one: answers do not wait for each other's acknowledgements
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    try {
      ReplyReader reader;  // commands have the form of replies
      while (IsReadable(client) && AnswerSome(client, reader)) continue;
    } catch (const ConnectionError&) {  // no commands: TLS
    }
    close(client);
  }

  // Receives once, and answers what is complete. False: the connection is over.
  bool AnswerSome(int client, ReplyReader& reader) {
    std::vector<uint8_t> buffer(1 << 16);
    const ssize_t count = recv(client, buffer.data(), buffer.size(), 0);
    if (count <= 0) return false;
    reader.AllowBytes(buffer.size());
    reader.Feed(std::span(buffer).first(static_cast<size_t>(count)));
    while (const Reply command = reader.Take()) {
      Words words;
      for (size_t i = 0; i < command->elements; ++i) {
        words.emplace_back(command->element[i]->str, command->element[i]->len);
      }
      const std::string answer = AnswerTo(words);
      for (size_t at = 0; at < answer.size();) {
        const ssize_t sent = send(client, answer.data() + at, answer.size() - at, MSG_NOSIGNAL);
        if (sent <= 0) return false;
        at += static_cast<size_t>(sent);
      }
      if (close_next_.exchange(false)) return false;
    }
    return true;
  }

  std::string AnswerTo(const Words& words) {
    Answer answer;
    {
      const std::lock_guard lock(mutex_);
      commands_.push_back(words);
      answer = answer_;
    }
    if (answer) {
      if (std::optional<std::string> given = answer(words)) return *given;
    }
    const std::lock_guard lock(mutex_);
    const std::string& name = words[0];
    if (name == "SET") {
      values_[words[1]] = words[2];
      return "+OK\r\n";
    }
    if (name == "STRLEN") {
      const auto found = values_.find(words[1]);
      return fmt::format(":{}\r\n", found == values_.end() ? 0 : found->second.size());
    }
    if (name == "UNLINK") return fmt::format(":{}\r\n", values_.erase(words[1]));
    if (name == "TOUCH" || name == "EXPIRE") return fmt::format(":{}\r\n", values_.count(words[1]));
    if (name == "MGET") {
      std::string reply = fmt::format("*{}\r\n", words.size() - 1);
      for (size_t i = 1; i < words.size(); ++i) {
        const auto found = values_.find(words[i]);
        reply += found == values_.end() ? "$-1\r\n" : fmt::format("${}\r\n{}\r\n", found->second.size(), found->second);
      }
      return reply;
    }
    return "+OK\r\n";
  }

  int port_ = 0;
  std::atomic<bool> stop_ = false, close_next_ = false;
  std::mutex mutex_;
  Answer answer_;
  std::map<std::string, std::string> values_;
  std::vector<Words> commands_;
  std::thread accepting_;
  std::vector<std::thread> serving_;
};

}  // namespace kvanta::store
