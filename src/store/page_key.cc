#include "store/page_key.h"

#include <sodium.h>

#include <bit>

namespace kvanta::store {
namespace {

static_assert(std::endian::native == std::endian::little, "token ids are hashed as little endian integers");
static_assert(std::tuple_size_v<PageKey> == crypto_hash_sha256_BYTES &&
              crypto_hash_sha256_BYTES == crypto_auth_hmacsha256_BYTES);

}  // namespace

PageKey IdentityKey(std::string_view identity) noexcept {
  PageKey key;
  crypto_hash_sha256(key.data(), reinterpret_cast<const unsigned char*>(identity.data()), identity.size());
  return key;
}

PageKey RootKey(const PageKey& identity, std::string_view salt) noexcept {
  if (salt.empty()) return identity;
  // HMAC pads its key with zeros and hashes a long one: as keys, "a" and "a\0" would be the same salt.
  PageKey salt_key, key;
  crypto_hash_sha256(salt_key.data(), reinterpret_cast<const unsigned char*>(salt.data()), salt.size());
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, salt_key.data(), salt_key.size());
  crypto_auth_hmacsha256_update(&state, identity.data(), identity.size());
  crypto_auth_hmacsha256_final(&state, key.data());
  return key;
}

PageKey ChildKey(const PageKey& parent, std::span<const int32_t> tokens) noexcept {
  PageKey key;
  crypto_hash_sha256_state state;
  crypto_hash_sha256_init(&state);
  crypto_hash_sha256_update(&state, parent.data(), parent.size());
  crypto_hash_sha256_update(&state, reinterpret_cast<const unsigned char*>(tokens.data()), tokens.size_bytes());
  crypto_hash_sha256_final(&state, key.data());
  return key;
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
