// A TCP connection with deadlines (base/clock.h), plain or under TLS. Failures are ConnectionErrors.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "store/resolver.h"

namespace kvanta::store {

// An error whose text may be shown: it has no secrets.
class ConnectionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Nothing came by the deadline.
class ConnectionTimeout final : public ConnectionError {
 public:
  using ConnectionError::ConnectionError;
};

class Connection {
 public:
  virtual ~Connection() = default;
  // Sends all of `bytes`.
  virtual void Send(std::span<const uint8_t> bytes, double deadline) = 0;
  // Waits for bytes and returns how many came, at least one.
  virtual size_t Receive(std::span<uint8_t> bytes, double deadline) = 0;
};

// Connects to the first address of the host that answers.
std::unique_ptr<Connection> ConnectTcp(const std::string& host, int port, double deadline, Resolver& resolver);

// Empty: the authorities of authorities.h, no certificate of the client.
struct TlsFiles {
  std::string ca, certificate, key;
};

// TLS 1.2 or later over `tcp`. Verifies the server's certificate for `host`.
std::unique_ptr<Connection> ConnectTls(std::unique_ptr<Connection> tcp, const std::string& host, const TlsFiles& files,
                                       double deadline);

}  // namespace kvanta::store
