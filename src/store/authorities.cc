#include "store/authorities.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <openssl/x509.h>

#include <cstdlib>

#include "base/quote.h"
#include "store/file_system.h"
#include "store/socket.h"

namespace kvanta::store {

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

}  // namespace kvanta::store
