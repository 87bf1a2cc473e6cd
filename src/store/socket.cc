#include "store/socket.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/clock.h"

namespace kvanta::store {
namespace {

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
