// TCP by nonblocking sockets, and the addresses of hosts.
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "store/connection.h"

namespace kvanta::store {

struct Resolver::Lookup {
  std::string host, service;
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;
  int error = 0;
  addrinfo* first = nullptr;

  bool HasFailed() {
    const std::lock_guard lock(mutex);
    return done && error != 0;
  }
  ~Lookup() {
    if (first != nullptr) freeaddrinfo(first);
  }
};

namespace {

int LookUp(const std::string& host, const std::string& service, int flags, addrinfo** first) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  return getaddrinfo(host.c_str(), service.c_str(), &hints, first);
}

class TcpConnection final : public Connection {
 public:
  explicit TcpConnection(int socket) : socket_(socket) {}
  ~TcpConnection() override { close(socket_); }
  TcpConnection(const TcpConnection&) = delete;
  TcpConnection& operator=(const TcpConnection&) = delete;

  void Connect(const addrinfo& address, double deadline) {
    if (connect(socket_, address.ai_addr, address.ai_addrlen) == 0) return;
    if (errno != EINPROGRESS) throw ConnectionError(std::strerror(errno));
    Wait(POLLOUT, deadline);
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) throw ConnectionError(std::strerror(error));
    const int on = 1;
    setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }

  void Send(std::span<const uint8_t> bytes, double deadline) override {
    while (!bytes.empty()) {
      const ssize_t sent = send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent >= 0) {
        bytes = bytes.subspan(static_cast<size_t>(sent));
      } else {
        WaitAfterError(POLLOUT, deadline);
      }
    }
  }

  size_t Receive(std::span<uint8_t> bytes, double deadline) override {
    for (;;) {
      const ssize_t received = recv(socket_, bytes.data(), bytes.size(), 0);
      if (received > 0) return static_cast<size_t>(received);
      if (received == 0) throw ConnectionError("the connection was closed");
      WaitAfterError(POLLIN, deadline);
    }
  }

 private:
  void WaitAfterError(short events, double deadline) const {
    if (errno == EINTR) return;
    if (errno != EAGAIN && errno != EWOULDBLOCK) throw ConnectionError(std::strerror(errno));
    Wait(events, deadline);
  }

  void Wait(short events, double deadline) const {
    pollfd waited = {.fd = socket_, .events = events, .revents = 0};
    for (;;) {
      const double seconds = deadline - Now();
      if (seconds <= 0) throw ConnectionTimeout("no answer in time");
      const int ready = poll(&waited, 1, static_cast<int>(std::ceil(seconds * 1e3)));
      if (ready > 0) return;
      if (ready < 0 && errno != EINTR) throw ConnectionError(std::strerror(errno));
    }
  }

  const int socket_;
};

}  // namespace

Addresses Resolver::Resolve(const std::string& host, int port, double deadline) {
  const std::string service = std::to_string(port);
  addrinfo* numeric = nullptr;
  if (LookUp(host, service, AI_NUMERICHOST, &numeric) == 0) return {numeric, &freeaddrinfo};
  if (!pending_ || pending_->host != host || pending_->service != service || pending_->HasFailed()) {
    auto lookup = std::make_shared<Lookup>();
    lookup->host = host;
    lookup->service = service;
    try {
      std::thread([lookup] {
        addrinfo* first = nullptr;
        const int error = LookUp(lookup->host, lookup->service, 0, &first);
        const std::lock_guard lock(lookup->mutex);
        lookup->error = error;
        lookup->first = first;
        lookup->done = true;
        lookup->ended.notify_all();
      }).detach();
    } catch (const std::system_error& error) {
      throw ConnectionError(error.code().message());
    }
    pending_ = std::move(lookup);
  }
  {
    std::unique_lock lock(pending_->mutex);
    const auto left = std::chrono::duration<double>(deadline - Now());
    if (!pending_->ended.wait_for(lock, left, [this] { return pending_->done; })) {
      throw ConnectionError("the name of the host was not resolved in time");
    }
  }
  const std::shared_ptr<Lookup> lookup = std::exchange(pending_, nullptr);
  if (lookup->error != 0) throw ConnectionError(fmt::format("the name of the host: {}", gai_strerror(lookup->error)));
  return {lookup, lookup->first};
}

std::unique_ptr<Connection> ConnectTcp(const std::string& host, int port, double deadline, Resolver& resolver) {
  const Addresses addresses = resolver.Resolve(host, port, deadline);
  std::string why = "the host has no address";
  int left = 0;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) ++left;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next, --left) {
    const int opened = socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, address->ai_protocol);
    if (opened < 0) {
      why = std::strerror(errno);
      continue;
    }
    auto connection = std::make_unique<TcpConnection>(opened);
    try {
      // Packets to one address may be dropped: it leaves the others their share of the time.
      const double now = Now();
      connection->Connect(*address, now + (deadline - now) / left);
      return connection;
    } catch (const ConnectionError& error) {
      why = error.what();
    }
  }
  throw ConnectionError(why);
}

}  // namespace kvanta::store
