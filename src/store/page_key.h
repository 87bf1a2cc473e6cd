// Keys of stored pages: SHA-256, chained from an identity over the token ids of all pages from the first on. A salt's
// SHA-256 keys the chain (HMAC), so that pages of one salt are never found with another.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "cache/record_listener.h"

namespace kvanta::store {

using cache::PageKey;

// The functions throw std::bad_alloc where OpenSSL gets no memory.

// identity: text of all that the bytes of a page depend on besides its token ids.
PageKey IdentityKey(std::string_view identity);
// Name of an identity among others in one place: the first hexadecimal digits of its key.
inline constexpr size_t kIdentityDigits = 32;
std::string IdentityName(const PageKey& identity);
// Key of the empty prefix.
PageKey RootKey(const PageKey& identity, std::string_view salt);
PageKey ChildKey(const PageKey& parent, std::span<const int32_t> tokens);

std::string Hex(std::span<const uint8_t> bytes);

}  // namespace kvanta::store
