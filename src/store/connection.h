// TCP connections with deadlines (base/clock.h), plain or under TLS. Failures are ConnectionErrors.
#pragma once

#include <netdb.h>

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

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

// ---- TCP (tcp.cc)

// Addresses of one host, linked by ai_next; at least one.
using Addresses = std::shared_ptr<const addrinfo>;

// The system's lookup has no deadline: it runs on a thread of its own, which is left behind.
class Resolver {
 public:
  // Throws ConnectionError. What is not found by the deadline is waited for by the next call with these
  // arguments, so that there is one thread however long a name server stays silent; what has failed until then is
  // looked up again.
  Addresses Resolve(const std::string& host, int port, double deadline);

 private:
  struct Lookup;
  std::shared_ptr<Lookup> pending_;
};

// Connects to the first address of the host that answers.
std::unique_ptr<Connection> ConnectTcp(const std::string& host, int port, double deadline, Resolver& resolver);

// ---- TLS (tls.cc)

// Places of files with certificates of authorities, apart from those that the environment names.
struct AuthorityPlaces {
  std::string file = {}, folder = {};           // OpenSSL's own, fixed when it was built
  std::vector<std::string> distributions = {};  // one file each
};
AuthorityPlaces SystemAuthorityPlaces();

// A file to load; empty: OpenSSL finds them by itself (SSL_CERT_FILE, SSL_CERT_DIR, its own places). A wheel's OpenSSL
// knows the places of the distribution that it was built on, so those of others are looked for here. `named`: file of
// the URL, which goes first; empty: none. Throws ConnectionError if there are none, or a named one cannot
// be read.
std::string FindAuthorities(const std::string& named, const AuthorityPlaces& places);

// Empty: the CA certificates of the system, no certificate of the client.
struct TlsFiles {
  std::string ca, certificate, key;
};

// TLS 1.2 or later over `tcp`. Verifies the server's certificate for `host`.
std::unique_ptr<Connection> ConnectTls(std::unique_ptr<Connection> tcp, const std::string& host, const TlsFiles& files,
                                       double deadline);

}  // namespace kvanta::store
