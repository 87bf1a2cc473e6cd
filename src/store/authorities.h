// The certificates of authorities that a server's is verified with.
#pragma once

#include <string>
#include <vector>

namespace kvanta::store {

// Places of files with them, apart from those that the environment names.
struct AuthorityPlaces {
  std::string file = {}, folder = {};           // OpenSSL's own, fixed when it was built
  std::vector<std::string> distributions = {};  // one file each
};
AuthorityPlaces SystemAuthorityPlaces();

// A file to load; empty: OpenSSL finds them by itself (SSL_CERT_FILE, SSL_CERT_DIR, its own places). A wheel's OpenSSL
// knows the places of the distribution that it was built on, so those of others are looked for here. `named`: file of
// the URL, which goes first; empty: none. Throws ConnectionError (socket.h) if there are none, or a named one cannot
// be read.
std::string FindAuthorities(const std::string& named, const AuthorityPlaces& places);

}  // namespace kvanta::store
