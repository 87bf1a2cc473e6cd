// TLS by OpenSSL over memory: its own sockets would raise SIGPIPE, and have no deadlines.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <array>
#include <cstdlib>
#include <utility>
#include <vector>

#include "base/quote.h"
#include "store/connection.h"
#include "store/file_system.h"

namespace kvanta::store {
namespace {

constexpr size_t kRecordBytes = 32 << 10;  // received at once: more than a record of TLS

[[noreturn]] void ThrowTlsError(const std::string& what) {
  std::array<char, 256> text = {};
  ERR_error_string_n(ERR_get_error(), text.data(), text.size());
  ERR_clear_error();
  throw ConnectionError(fmt::format("TLS: {}: {}", what, Sanitize(text.data())));
}

bool IsAddress(const std::string& host) {
  std::array<uint8_t, 16> bytes = {};
  return inet_pton(AF_INET, host.c_str(), bytes.data()) == 1 || inet_pton(AF_INET6, host.c_str(), bytes.data()) == 1;
}

class TlsConnection final : public Connection {
 public:
  TlsConnection(std::unique_ptr<Connection> tcp, const std::string& host, const TlsFiles& files)
      : tcp_(std::move(tcp)), context_(SSL_CTX_new(TLS_client_method()), &SSL_CTX_free), ssl_(nullptr, &SSL_free) {
    SSL_CTX* context = context_.get();
    if (context == nullptr || SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION) != 1) ThrowTlsError("context");
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
    authorities_ = FindAuthorities(files.ca, SystemAuthorityPlaces());
    const bool has_authorities = authorities_.empty()
                                     ? SSL_CTX_set_default_verify_paths(context) == 1
                                     : SSL_CTX_load_verify_locations(context, authorities_.c_str(), nullptr) == 1;
    if (!has_authorities) ThrowTlsError(fmt::format("certificates of {}", AuthoritiesName()));
    if (!files.certificate.empty()) {
      if (SSL_CTX_use_certificate_chain_file(context, files.certificate.c_str()) != 1) ThrowTlsError("ssl_certfile");
      if (SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), SSL_FILETYPE_PEM) != 1) ThrowTlsError("ssl_keyfile");
    }
    ssl_.reset(SSL_new(context));
    if (ssl_ == nullptr) ThrowTlsError("connection");
    const bool named = IsAddress(host) ? X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl_.get()), host.c_str()) == 1
                                       : SSL_set1_host(ssl_.get(), host.c_str()) == 1 &&
                                             SSL_set_tlsext_host_name(ssl_.get(), host.c_str()) == 1;
    if (!named) ThrowTlsError("host");
    incoming_ = BIO_new(BIO_s_mem());
    outgoing_ = BIO_new(BIO_s_mem());
    if (incoming_ == nullptr || outgoing_ == nullptr) {
      BIO_free(incoming_);
      BIO_free(outgoing_);
      ThrowTlsError("memory");
    }
    SSL_set_bio(ssl_.get(), incoming_, outgoing_);  // owns them
  }

  void Handshake(double deadline) {
    for (;;) {
      const int result = SSL_connect(ssl_.get());
      SendPending(deadline);
      if (result == 1) return;
      if (const long verified = SSL_get_verify_result(ssl_.get()); verified != X509_V_OK) {
        ERR_clear_error();
        throw ConnectionError(fmt::format("TLS: the server's certificate: {}; authorities: {}",
                                          X509_verify_cert_error_string(verified), AuthoritiesName()));
      }
      ReceiveMore(result, "handshake", deadline);
    }
  }

  void Send(std::span<const uint8_t> bytes, double deadline) override {
    while (!bytes.empty()) {
      size_t taken = 0;
      const int result = SSL_write_ex(ssl_.get(), bytes.data(), std::min(bytes.size(), kRecordBytes), &taken);
      SendPending(deadline);
      if (result == 1) {
        bytes = bytes.subspan(taken);
      } else {
        ReceiveMore(result, "send", deadline);
      }
    }
  }

  size_t Receive(std::span<uint8_t> bytes, double deadline) override {
    for (;;) {
      size_t received = 0;
      const int result = SSL_read_ex(ssl_.get(), bytes.data(), bytes.size(), &received);
      SendPending(deadline);
      if (result == 1) return received;
      ReceiveMore(result, "receive", deadline);
    }
  }

 private:
  void SendPending(double deadline) {
    for (;;) {
      const int count = BIO_read(outgoing_, buffer_.data(), static_cast<int>(buffer_.size()));
      if (count <= 0) return;
      tcp_->Send(std::span(buffer_).first(static_cast<size_t>(count)), deadline);
    }
  }

  // Receives what OpenSSL needs to go on after `result`.
  void ReceiveMore(int result, const char* what, double deadline) {
    const int error = SSL_get_error(ssl_.get(), result);
    if (error == SSL_ERROR_ZERO_RETURN) throw ConnectionError("the connection was closed");
    if (error != SSL_ERROR_WANT_READ) ThrowTlsError(what);
    const size_t count = tcp_->Receive(buffer_, deadline);
    if (BIO_write(incoming_, buffer_.data(), static_cast<int>(count)) != static_cast<int>(count)) {
      ThrowTlsError("memory");
    }
  }

  std::string AuthoritiesName() const { return authorities_.empty() ? "OpenSSL's own" : Quote(authorities_); }

  std::unique_ptr<Connection> tcp_;
  std::string authorities_;  // file; empty: OpenSSL's own
  std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context_;
  std::unique_ptr<SSL, decltype(&SSL_free)> ssl_;
  BIO* incoming_ = nullptr;
  BIO* outgoing_ = nullptr;
  std::vector<uint8_t> buffer_ = std::vector<uint8_t>(kRecordBytes);
};

}  // namespace

AuthorityPlaces SystemAuthorityPlaces() {
  return {.file = X509_get_default_cert_file(),
          .folder = X509_get_default_cert_dir(),
          .distributions = {
              "/etc/ssl/certs/ca-certificates.crt",                 // Debian, Ubuntu, Arch, Gentoo, Alpine
              "/etc/pki/tls/certs/ca-bundle.crt",                   // Fedora, RHEL, Amazon Linux
              "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  // Fedora since 43
              "/etc/ssl/ca-bundle.pem",                             // openSUSE
              "/etc/ssl/cert.pem",
          }};
}

std::string FindAuthorities(const std::string& named, const AuthorityPlaces& places) {
  if (!named.empty()) {
    if (!FileExists(named)) throw ConnectionError(fmt::format("TLS: ssl_ca_certs = {} cannot be read", Quote(named)));
    return named;
  }
  const char* chosen = std::getenv(X509_get_default_cert_file_env());
  if (chosen != nullptr && !FileExists(chosen)) {
    throw ConnectionError(fmt::format("TLS: {} = {} cannot be read", X509_get_default_cert_file_env(), Quote(chosen)));
  }
  const bool in_environment = chosen != nullptr || std::getenv(X509_get_default_cert_dir_env()) != nullptr;
  if (in_environment || FileExists(places.file)) return {};
  for (const std::string& file : places.distributions) {
    if (FileExists(file)) return file;
  }
  if (FileExists(places.folder)) return {};
  throw ConnectionError(
      fmt::format("TLS: no certificates of authorities: {}, {} and {} are missing; install ca-certificates, set {} or "
                  "add ?ssl_ca_certs=FILE to the URL",
                  fmt::join(places.distributions, ", "), places.file, places.folder, X509_get_default_cert_file_env()));
}

std::unique_ptr<Connection> ConnectTls(std::unique_ptr<Connection> tcp, const std::string& host, const TlsFiles& files,
                                       double deadline) {
  auto connection = std::make_unique<TlsConnection>(std::move(tcp), host, files);
  connection->Handshake(deadline);
  return connection;
}

}  // namespace kvanta::store
