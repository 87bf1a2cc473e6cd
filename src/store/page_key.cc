#include "store/page_key.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <bit>
#include <initializer_list>
#include <memory>
#include <new>

namespace kvanta::store {
namespace {

static_assert(std::endian::native == std::endian::little, "token ids are hashed as little endian integers");

using Bytes = std::span<const uint8_t>;

Bytes BytesOf(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// The thread's context: no hash but the first allocates memory.
EVP_MD_CTX* Context() {
  // A thread that hangs in the system is left behind and may hash while the process exits, after OpenSSL's cleanup.
  static const int initialized = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  thread_local std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(nullptr, &EVP_MD_CTX_free);
  if (context == nullptr && initialized == 1) context.reset(EVP_MD_CTX_new());
  if (context == nullptr) throw std::bad_alloc();
  return context.get();
}

PageKey Sha256(std::initializer_list<Bytes> parts) {
  PageKey key;
  EVP_MD_CTX* const context = Context();
  bool hashed =
      EVP_MD_get_size(EVP_sha256()) == std::ssize(key) && EVP_DigestInit_ex(context, EVP_sha256(), nullptr) == 1;
  for (const Bytes part : parts) hashed = hashed && EVP_DigestUpdate(context, part.data(), part.size()) == 1;
  if (!hashed || EVP_DigestFinal_ex(context, key.data(), nullptr) != 1) throw std::bad_alloc();
  return key;
}

}  // namespace

PageKey IdentityKey(std::string_view identity) {
  return Sha256({BytesOf(identity)});
}

PageKey RootKey(const PageKey& identity, std::string_view salt) {
  if (salt.empty()) return identity;
  // HMAC pads its key with zeros and hashes a long one: as keys, "a" and "a\0" would be the same salt.
  const PageKey salt_key = Sha256({BytesOf(salt)});
  PageKey key;
  if (HMAC(EVP_sha256(), salt_key.data(), static_cast<int>(salt_key.size()), identity.data(), identity.size(),
           key.data(), nullptr) == nullptr) {
    throw std::bad_alloc();
  }
  return key;
}

PageKey ChildKey(const PageKey& parent, std::span<const int32_t> tokens) {
  return Sha256({parent, {reinterpret_cast<const uint8_t*>(tokens.data()), tokens.size_bytes()}});
}

std::string Hex(std::span<const uint8_t> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const uint8_t byte : bytes) {
    text.push_back(kDigits[byte >> 4U]);
    text.push_back(kDigits[byte & 15U]);
  }
  return text;
}

std::string IdentityName(const PageKey& identity) {
  return Hex(identity).substr(0, kIdentityDigits);
}

}  // namespace kvanta::store
